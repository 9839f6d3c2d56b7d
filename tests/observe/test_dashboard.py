"""The page is whole without a network, shows what the status says and runs no stranger's text."""

from html.parser import HTMLParser

from diloco_cli.observe.dashboard import page
from tests.observe.documents import make_status

STATUS = make_status(
    state="training",
    outer_steps=12,
    tokens={"applied": 400, "pending": 50},
    loss={"heldout": 2.75},
    wire={"bits_per_parameter_up": 3.154},
    regions=[
        {"name": "left", "alive": True, "training": True, "contributing": True, "share": 0.75},
        {"name": "right", "alive": False, "why": "<script>alert(1)</script>"},
    ],
)

VOID = {"meta", "br"}


class Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.scripts, self.outside, self.text = [], 0, [], []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.outside += [v for k, v in attrs if k in ("src", "href") and "//" in (v or "")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(status):
    parser = Outline()
    parser.feed(page(status))
    assert parser.open == []
    return parser


def test_the_page_shows_the_figures_of_the_status():
    text = " ".join(outline(STATUS).text)
    for fact in ("quickstart: training", "400 of 1000 tokens", "2.750", "3.15", "75%", "away"):
        assert fact in text


def test_text_from_regions_is_escaped_and_nothing_comes_from_outside():
    parsed = outline(STATUS)
    assert parsed.scripts == 1 and parsed.outside == []
    assert "<script>alert" not in page(STATUS)


def test_a_run_no_region_has_joined_yet_has_a_page_too():
    waiting = make_status(regions=[{"name": "left", "why": "not joined yet"}])
    assert "away not joined yet" in " ".join("".join(outline(waiting).text).split())

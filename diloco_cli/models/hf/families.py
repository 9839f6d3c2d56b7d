"""Which model is a config.json, and what are its tensors called there?

    config.json    choice_of    →  {kind: decoder, layers: …}     a choice as in a spec
                   config_of    ←
    tensors        places_of    →  model.layers.0.self_attn.q_proj.weight, transposed

Theirs are outputs × inputs, ours inputs × outputs. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from diloco_cli.errors import SpecError
from diloco_cli.models.positions import Rope
from diloco_cli.models.protocol import Model
from diloco_cli.models.transformer import ExpertShape, Shape, Transformer

Config = Mapping[str, Any]
Choice = dict[str, Any]


class Place(NamedTuple):
    """Where a tensor of ours, or one row of it, is found among theirs."""

    name: str
    transposed: bool = False
    rows: int = 0
    """Where every row of ours is a tensor of theirs: how many; `*` in the name is the row."""

    @property
    def names(self) -> list[str]:
        if not self.rows:
            return [self.name]
        return [self.name.replace("*", str(row)) for row in range(self.rows)]


# Tensors

_OUTSIDE = {
    "embed": Place("embed_tokens.weight"),
    "norm": Place("norm.weight"),
}
_BLOCK = {
    "attention.norm": Place("input_layernorm.weight"),
    **{f"attention.{each}": Place(f"self_attn.{each}_proj.weight", True) for each in "qkvo"},
    **{f"attention.{each}_bias": Place(f"self_attn.{each}_proj.bias") for each in "qkvo"},
    **{f"attention.{each}_norm": Place(f"self_attn.{each}_norm.weight") for each in "qk"},
    "ffn.norm": Place("post_attention_layernorm.weight"),
    **{f"ffn.{each}": Place(f"mlp.{each}_proj.weight", True) for each in ("gate", "up", "down")},
}


_MOE = {
    **_BLOCK,
    "ffn.router": Place("mlp.gate.weight", True),
    **{
        f"ffn.{each}": Place(f"mlp.experts.*.{each}_proj.weight", True)
        for each in ("gate", "up", "down")
    },
}
_GEMMA = {
    **_BLOCK,
    "attention.post_norm": Place("post_attention_layernorm.weight"),
    "ffn.norm": Place("pre_feedforward_layernorm.weight"),
    "ffn.post_norm": Place("post_feedforward_layernorm.weight"),
}


def scalar_name(layer: int, prefix: str = "model.") -> str:
    """What a layer's result is multiplied by; among Gemma's weights, but never trained."""
    return f"{prefix}layers.{layer}.layer_scalar"


def places_of(shape: Shape, tensor: str, prefix: str = "model.") -> Place:
    """Says where a tensor of ours is found among theirs."""
    if tensor == "output":
        return Place("lm_head.weight", True)
    if tensor in _OUTSIDE:
        place = _OUTSIDE[tensor]
        return place._replace(name=prefix + place.name)
    _, number, name = tensor.split(".", 2)
    place = (_GEMMA if shape.post_norms else _MOE if shape.experts else _BLOCK)[name]
    if "*" in place.name and shape.experts:
        place = place._replace(rows=shape.experts.number)
    return place._replace(name=f"{prefix}layers.{int(number)}.{place.name}")


# config.json → options


class _Reader:
    """Takes keys out of a config.json, and says which one is missing or means something else."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise SpecError(
                f"config.json has no {key!r}, which {self.name} needs.",
                hint="Take config.json from where the weights are from.",
            )
        return self.config[key]

    @property
    def name(self) -> str:
        return str(self.config.get("model_type"))

    def refuse(self, key: str, *usual: Any) -> None:
        """Raises when a key asks for what we do not have."""
        if self.config.get(key) not in usual:
            wanted = " or ".join(repr(each) for each in usual if each is not None)
            raise SpecError(
                f"config.json of {self.name} has {key} {self.config[key]!r}, which is not built.",
                hint=f"Models with {key} {wanted} can be taken over.",
            )


def choice_of(config: Config) -> Choice:
    """Reads a config.json as a choice of model; raises SpecError with what is missing."""
    read = _Reader(config)
    architecture = read.name if config.get("model_type") else None
    if architecture not in FAMILIES:
        named = ", ".join(config.get("architectures") or []) or "no architectures"
        raise SpecError(
            f"config.json has model_type {architecture!r} ({named}), which is no family we know.",
            hint=f"Known are {', '.join(FAMILIES)}.",
        )
    choice = FAMILIES[architecture].read(read)
    return {key: value for key, value in choice.items() if value is not None}


def _decoder(read: _Reader) -> Choice:
    config = read.config
    read.refuse("hidden_act", "silu", None)
    read.refuse("use_sliding_window", False, None)
    theta, scaling = _scaling(read)
    eps = float(config.get("rms_norm_eps", 1e-6))
    return {
        "kind": "decoder",
        "layers": read("num_hidden_layers"),
        "width": read("hidden_size"),
        "heads": read("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads") or read("num_attention_heads"),
        "ffn": read("intermediate_size"),
        "vocabulary": read("vocab_size"),
        "rope_theta": theta,
        "head": config.get("head_dim"),
        "tied": None if config.get("tie_word_embeddings") else False,
        "eps": None if eps == 1e-6 else eps,
        "rope": scaling,
    }


def _qwen3(read: _Reader) -> Choice:
    bias = "qkvo" if read.config.get("attention_bias") else None
    return {**_decoder(read), "head": read("head_dim"), "bias": bias}


def _qwen3_moe(read: _Reader) -> Choice:
    config = read.config
    read.refuse("decoder_sparse_step", 1, None)
    read.refuse("mlp_only_layers", [], None)
    return {
        **_qwen3(read),
        "head": config.get("head_dim"),
        "ffn": read("moe_intermediate_size"),
        "experts": config.get("num_experts") or read("num_local_experts"),
        "active": read("num_experts_per_tok"),
        "renormalised": None if config.get("norm_topk_prob") else False,
        "balance": config.get("router_aux_loss_coef"),
    }


def _llama(read: _Reader) -> Choice:
    read.refuse("mlp_bias", False, None)
    bias = "qkvo" if read.config.get("attention_bias") else None
    return {**_decoder(read), "qk_norm": False, "bias": bias}


def _qwen2(read: _Reader) -> Choice:
    return {**_decoder(read), "qk_norm": False, "bias": "qkv"}


def _gemma4(read: _Reader) -> Choice:
    config = read.config.get("text_config")
    if isinstance(config, Mapping):  # Where a model sees as well, this is its text decoder.
        read = _Reader(config)
    config = read.config
    read.refuse("hidden_activation", "gelu_pytorch_tanh", None)
    # Of small models only.
    read.refuse("hidden_size_per_layer_input", 0)
    read.refuse("num_kv_shared_layers", 0, None)
    read.refuse("use_double_wide_mlp", False, None)
    read.refuse("enable_moe_block", False, None)
    read.refuse("attention_bias", False, None)
    read.refuse("use_bidirectional_attention", None, "vision")
    read.refuse("tie_word_embeddings", True, None)
    types = config.get("layer_types") or ["sliding_attention"] * 5 + ["full_attention"]
    pattern = _period("".join("f" if each == "full_attention" else "s" for each in types))
    full = _of_full_layers(config, len(pattern) - 1)
    ropes = config.get("rope_parameters") or {}
    sliding, wide = (ropes.get(f"{each}_attention") or {} for each in ("sliding", "full"))
    shared = bool(config.get("attention_k_eq_v"))
    return {
        "kind": "gemma4",
        "layers": read("num_hidden_layers"),
        "width": read("hidden_size"),
        "ffn": read("intermediate_size"),
        "heads": read("num_attention_heads"),
        "kv_heads": read("num_key_value_heads"),
        "full_kv_heads": full.get("num_key_value_heads") or read("num_key_value_heads"),
        "head": read("head_dim"),
        "full_head": full.get("head_dim") or read("head_dim"),
        "vocabulary": read("vocab_size"),
        "pattern": pattern,
        "window": read("sliding_window"),
        "value_is_key": shared,
        "rope_theta": float(sliding.get("rope_theta", 10_000.0)),
        "full_rope_theta": float(wide.get("rope_theta", 1_000_000.0)),
        "full_turned": float(wide.get("partial_rotary_factor", 0.25 if not wide else 1.0)),
        "eps": float(config.get("rms_norm_eps", 1e-6)),
        "softcap": config.get("final_logit_softcapping"),
    }


def _of_full_layers(config: Config, layer: int) -> Config:
    """What layers that see everything have for themselves, as either form of config.json says."""
    own = (config.get("per_layer_config") or {}).get(str(layer))
    if own is not None:
        return own
    shared = config.get("attention_k_eq_v")
    kv_heads = config.get("num_global_key_value_heads") if shared else None
    return {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": kv_heads}


def _period(letters: str) -> str:
    """The shortest beginning that makes up all of it when repeated."""
    lengths = (length for length in range(1, len(letters) + 1) if len(letters) % length == 0)
    return next(
        letters[:length]
        for length in lengths
        if letters[:length] * (len(letters) // length) == letters
    )


def _scaling(read: _Reader) -> tuple[float, Choice | None]:
    """The base of positions and their scaling, as versions 4 and 5 of transformers write it."""
    config = read.config
    found: Config = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if found.get("partial_rotary_factor", 1) != 1:
        raise SpecError(
            f"config.json of {read.name} turns a part of each head only "
            f"(partial_rotary_factor {found['partial_rotary_factor']}), which is not built."
        )
    if kind == "default":
        return theta, None
    if kind not in _SCALINGS:
        raise SpecError(
            f"config.json of {read.name} scales positions by {kind!r}, which is not built.",
            hint=f"Known are default, {', '.join(_SCALINGS)}.",
        )
    scaling: Choice = {"kind": kind}
    for ours, theirs in _SCALINGS[kind].items():
        if found.get(theirs) is not None:
            scaling[ours] = found[theirs]
        elif ours in ("factor", "original", "low", "high"):
            raise SpecError(f"config.json has rope of kind {kind} without {theirs!r}.")
    return theta, scaling


_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        **{"factor": "factor", "original": _ORIGINAL},
        **{"low": "low_freq_factor", "high": "high_freq_factor"},
    },
    "yarn": {
        **{each: each for each in ("factor", "beta_fast", "beta_slow", "attention_factor")},
        **{"original": _ORIGINAL, "truncate": "truncate"},
    },
}
"""Options of each scaling of positions: ours and theirs."""


# Options → config.json


def config_of(model: Model, *, sequence: int) -> dict[str, Any]:
    """Writes a model as a config.json; `sequence` is the longest that it was trained with."""
    if not isinstance(model, Transformer):
        raise _no_family(f"a model of type {type(model).__name__}")
    return FAMILIES[family_of(model.shape)].write(model.shape, sequence)


def family_of(shape: Shape) -> str:
    """The model_type that has this arithmetic."""
    attention = shape.attention[0]
    if shape.post_norms:
        return "gemma4_text"
    if shape.experts and not (attention.qk_norm and attention.bias in ("", "qkvo")):
        raise _no_family("a decoder with experts, without qk_norm or with `bias: qkv`,")
    if shape.experts:
        return "qwen3_moe"
    if attention.qk_norm and attention.bias in ("", "qkvo"):
        return "qwen3"
    if not attention.qk_norm and attention.bias in ("", "qkvo"):
        return "llama"
    if not attention.qk_norm:
        return "qwen2"
    raise _no_family("a decoder with qk_norm and `bias: qkv`")


def _no_family(what: str) -> SpecError:
    return SpecError(
        f"There is no family of models that {what} belongs to.",
        hint="`diloco pull` writes its weights under our own names.",
    )


def _write(name: str, architecture: str, shape: Shape, sequence: int) -> dict[str, Any]:
    attention = shape.attention[0]
    parameters = _rope_parameters(attention.rope)
    longest = sequence
    if attention.rope.original:
        longest = max(sequence, int(attention.rope.original * attention.rope.factor))
    return {
        "architectures": [architecture],
        "model_type": name,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied,
        "attention_bias": attention.bias == "qkvo",
        "attention_dropout": 0.0,
        "max_position_embeddings": longest,
        # transformers 5 reads the first, transformers 4 the other two.
        "rope_parameters": parameters,
        "rope_theta": attention.rope.theta,
        "rope_scaling": None
        if attention.rope.kind == "default"
        else {key: value for key, value in parameters.items() if key != "rope_theta"},
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **(_write_experts(shape, shape.experts) if shape.experts else {}),
    }


def _write_experts(shape: Shape, experts: ExpertShape) -> dict[str, Any]:
    return {
        # transformers 4 reads the first, transformers 5 both.
        "num_experts": experts.number,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.active,
        "norm_topk_prob": experts.renormalised,
        "moe_intermediate_size": shape.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def _write_gemma4(shape: Shape, sequence: int) -> dict[str, Any]:
    layers = [shape.attention_of(layer) for layer in range(shape.layers)]
    full = layers[-1]
    sliding = next((each for each in layers if each.window is not None), full)
    own = {"head_dim": full.head, "num_key_value_heads": full.kv_heads}
    types = ["full" if each.window is None else "sliding" for each in layers]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": sliding.heads,
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.head,
        "global_head_dim": full.head,
        "num_global_key_value_heads": full.kv_heads,
        "per_layer_config": {str(layer): own for layer, each in enumerate(types) if each == "full"},
        "layer_types": [f"{each}_attention" for each in types],
        "sliding_window": sliding.window or 512,
        "attention_k_eq_v": full.value_is_key,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": shape.softcap,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "max_position_embeddings": sequence,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding.rope.theta},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": full.rope.theta,
                "partial_rotary_factor": full.rope.share,
            },
        },
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    options = {
        theirs: getattr(rope, ours)
        for ours, theirs in _SCALINGS.get(rope.kind, {}).items()
        if getattr(rope, ours) is not None
    }
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **options}


class Family(NamedTuple):
    read: Callable[[_Reader], Choice]
    write: Callable[[Shape, int], dict[str, Any]]


def _families() -> Iterator[tuple[str, Family]]:
    for name, architecture, read in (
        ("qwen3", "Qwen3ForCausalLM", _qwen3),
        ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
        ("llama", "LlamaForCausalLM", _llama),
        ("qwen2", "Qwen2ForCausalLM", _qwen2),
    ):

        def write(
            shape: Shape, sequence: int, name: str = name, architecture: str = architecture
        ) -> dict[str, Any]:
            return _write(name, architecture, shape, sequence)

        yield name, Family(read, write)
    yield "gemma4_text", Family(_gemma4, _write_gemma4)
    yield "gemma4", Family(_gemma4, _write_gemma4)


FAMILIES: dict[str, Family] = dict(_families())
"""By model_type."""

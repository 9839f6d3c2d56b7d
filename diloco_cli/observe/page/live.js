// Swaps in a fresh copy of the page: soon after an event, and now and then without one.
'use strict';
const link = document.getElementById('link');
const SOON = 1000, NOW_AND_THEN = 5000, HIDDEN = 30000;
let timer = 0, asked = 0, failures = 0, over = false;

async function refresh() {
  asked = Date.now();
  try {
    const answer = await fetch('/' + location.search, {cache: 'no-store'});
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
    const main = fresh.getElementById('live'), shown = document.getElementById('live');
    // What somebody points at or has scrolled stays where it is.
    const focus = document.activeElement?.getAttribute?.('href');
    const scrolled = [...shown.querySelectorAll('.events')].map(list => list.scrollTop);
    shown.replaceWith(main);
    main.querySelectorAll('.events').forEach((list, n) => { list.scrollTop = scrolled[n] || 0; });
    if (focus) main.querySelector(`a[href="${CSS.escape(focus)}"]`)?.focus();
    document.title = fresh.title;
    link.textContent = '';
    document.documentElement.classList.remove('gone');
    failures = 0;
    over = ['finished', 'stopped'].includes(main.dataset.state);
  } catch (error) {
    failures += 1;
    link.textContent = 'The server does not answer; this is its last answer.';
    document.documentElement.classList.add('gone');
  }
  const wait = failures ? Math.min(HIDDEN, SOON * 2 ** (failures - 1)) : over ? HIDDEN : NOW_AND_THEN;
  plan(document.hidden ? HIDDEN : wait);
}

function plan(wait) {
  clearTimeout(timer);
  timer = setTimeout(refresh, wait);
}

function soon() {
  if (!document.hidden) plan(Math.max(0, asked + SOON - Date.now()));
}

function listen() {
  const events = new EventSource('/v1/events');
  for (const kind of ['published', 'evaluated', 'joined', 'lapsed', 'left', 'amended', 'run-finished',
    'run-stopped', 'server-started'])
    events.addEventListener(kind, soon);
  events.addEventListener('open', soon);
  // Somebody who may not read the log still sees the page, every few seconds.
  events.addEventListener('error', () => { if (events.readyState === 2) setTimeout(listen, HIDDEN); });
}

document.addEventListener('visibilitychange', soon);
listen();
plan(SOON);

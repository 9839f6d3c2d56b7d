// Swaps in newer parts of the page: soon after an event, and now and then without one. Reads
// values off the charts. What is drawn comes from the server; nothing is kept here but the view.
'use strict';
const link = document.getElementById('link');
const SOON = 1000, NOW_AND_THEN = 5000, HIDDEN = 30000;
let timer = 0, asked = 0, failures = 0, over = false;

async function refresh() {
  asked = Date.now();
  try {
    const answer = await fetch('/' + location.search, {cache: 'no-store'});
    if (!answer.ok) throw new Error(answer.status);
    swap(new DOMParser().parseFromString(await answer.text(), 'text/html'));
    link.textContent = '';
    document.documentElement.classList.remove('gone');
    document.documentElement.classList.add('live');
    failures = 0;
  } catch (error) {
    failures += 1;
    link.textContent = 'The server does not answer; this is its last answer.';
    document.documentElement.classList.add('gone');
    document.documentElement.classList.remove('live');
  }
  const wait = failures ? Math.min(HIDDEN, SOON * 2 ** (failures - 1)) : over ? HIDDEN : NOW_AND_THEN;
  plan(document.hidden ? HIDDEN : wait);
}

// A part that is as it was stays, with what somebody has selected in it. In one that changes,
// what was folded out, ticked, scrolled or focused is so again.
function swap(fresh) {
  document.title = fresh.title;
  for (const part of fresh.querySelectorAll('#as-of, main > [id], main section')) {
    const shown = document.getElementById(part.id);
    if (shown && shown.innerHTML !== part.innerHTML) exchange(shown, part);
  }
  over = ['finished', 'stopped'].includes(fresh.getElementById('live').dataset.state);
  point();
}

function exchange(shown, part) {
  const focus = shown.contains(document.activeElement) ? address(document.activeElement) : '';
  const ticked = [...shown.querySelectorAll('input')].map(input => [input.id, input.checked]);
  const folded = [...shown.querySelectorAll('details[open]')].map(details => details.id);
  const scrolled = [...shown.querySelectorAll('.events, .wide')].map(box => [box.scrollTop, box.scrollLeft]);
  shown.replaceChildren(...part.childNodes);
  for (const [id, checked] of ticked) { const input = document.getElementById(id); if (input) input.checked = checked; }
  for (const id of folded) document.getElementById(id)?.setAttribute('open', '');
  shown.querySelectorAll('.events, .wide').forEach((box, n) => { [box.scrollTop, box.scrollLeft] = scrolled[n] || [0, 0]; });
  reachable(shown);
  if (focus) shown.querySelector(focus)?.focus({preventScroll: true});
}

function address(element) {
  if (element.id) return '#' + CSS.escape(element.id);
  const href = element.getAttribute('href');
  if (href) return `a[href="${CSS.escape(href)}"]`;
  const charts = [...element.closest('section')?.querySelectorAll('.lines') || []];
  return charts.includes(element) ? `.lines[data-y="${element.dataset.y}"], .lines` : '';
}

// Reading a chart: where the pointer is, or where the arrow keys have moved to.

const reading = {place: 0, share: null}, usual = new WeakMap();

function reachable(within) {
  for (const chart of within.querySelectorAll('.lines')) chart.tabIndex = 0;
}

function charts() { return [...document.querySelectorAll('.lines')]; }

function point() {
  document.querySelectorAll('.cross').forEach(line => line.remove());
  const chart = charts()[reading.place];
  if (reading.share === null || !chart) return;
  const [low, high] = chart.dataset.x.split(' ').map(Number);
  const [bottom, top, log] = chart.dataset.y.split(' ');
  const [across, up] = chart.dataset.units.split(' ');
  const words = [SAID[across](low + reading.share * (high - low))];
  for (const path of chart.querySelectorAll('path[data-name]')) {
    const height = heightAt(path.getAttribute('d'), 1000 * reading.share);
    if (height === null) continue;
    const share = 1 - height / 1000;
    const value = log ? Math.exp(Math.log(bottom) + share * (Math.log(top) - Math.log(bottom)))
      : Number(bottom) + share * (top - bottom);
    words.push(path.dataset.name + ' ' + SAID[up](value));
  }
  const svg = chart.firstElementChild, line = document.createElementNS(svg.namespaceURI, 'line');
  line.setAttribute('class', 'cross');
  for (const [key, value] of Object.entries({x1: 100 * reading.share + '%', x2: 100 * reading.share + '%', y1: 0, y2: '100%'}))
    line.setAttribute(key, value);
  svg.append(line);
  const said = chart.closest('section').querySelector('.read');
  if (said) {
    if (!usual.has(said)) usual.set(said, [...said.childNodes]);
    said.textContent = words.join(' · ');
  }
}

function leave() {
  reading.share = null;
  point();
  for (const said of document.querySelectorAll('.read'))
    if (usual.has(said)) said.replaceChildren(...usual.get(said));
}

// The height of a line of straight pieces: at the nearest point, or between two; none in a gap.
function heightAt(path, x) {
  let before = null, found = null, near = 2;
  for (const [, pen, across, height] of path.matchAll(/([ML])([-\d.e]+) ([-\d.e]+)/g)) {
    const here = [Number(across), Number(height)], away = Math.abs(here[0] - x);
    if (away <= near) [near, found] = [away, here[1]];
    else if (pen === 'L' && found === null && before[0] < x && x < here[0])
      return before[1] + (here[1] - before[1]) * (x - before[0]) / (here[0] - before[0]);
    before = here;
  }
  return found;
}

const SAID = {
  loss: value => value.toFixed(3),
  percent: value => Math.round(100 * value) + '%',
  amount: value => scaled(value, ['', 'k', 'M', 'G', 'T']),
  bytes_: value => scaled(value, [' B', ' kB', ' MB', ' GB', ' TB']),
  seconds: value => {
    const [days, hours, minutes] = [value / 86400, value / 3600, value / 60].map(Math.floor);
    if (days) return `${days} d ${hours % 24} h`;
    if (hours) return `${hours} h ${minutes % 60} min`;
    return minutes ? `${minutes} min ${Math.floor(value % 60)} s` : value.toFixed(1) + ' s';
  },
};

function scaled(value, units) {
  let n = 0;
  while (Math.abs(value) >= 1000 && n < units.length - 1) { value /= 1000; n += 1; }
  return (n ? value.toPrecision(3) : value.toFixed(0)) + units[n];
}

function readAt(chart, share) {
  reading.place = charts().indexOf(chart);
  reading.share = Math.min(1, Math.max(0, share));
  point();
}

document.addEventListener('pointermove', event => {
  const chart = event.target.closest?.('.lines');
  if (!chart) { if (reading.share !== null && !document.activeElement.matches?.('.lines')) leave(); return; }
  const box = chart.firstElementChild.getBoundingClientRect();
  readAt(chart, (event.clientX - box.left) / box.width);
});
document.addEventListener('focusout', event => { if (event.target.matches?.('.lines')) leave(); });
document.addEventListener('keydown', event => {
  const chart = document.activeElement.closest?.('.lines');
  const step = {ArrowLeft: -0.01, ArrowRight: 0.01}[event.key];
  if (event.key === 'Escape') leave();
  if (!chart || !step) return;
  event.preventDefault();
  readAt(chart, (reading.share ?? (step > 0 ? 0 : 1)) + step);
});

// Another view of the same page needs no reload.
document.addEventListener('click', event => {
  const anchor = event.target.closest?.('main a');
  const href = anchor?.getAttribute('href');
  if (!href?.startsWith('?') || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  history.replaceState(null, '', location.pathname + (href === '?' ? '' : href));
  refresh();
});

function plan(wait) {
  clearTimeout(timer);
  timer = setTimeout(refresh, wait);
}

function soon() {
  if (!document.hidden) plan(Math.max(0, asked + SOON - Date.now()));
}

function listen() {
  const events = new EventSource('/v1/events');
  for (const kind of ['published', 'evaluated', 'evaluated-ema', 'joined', 'lapsed', 'left', 'amended', 'run-finished',
    'run-stopped', 'server-started'])
    events.addEventListener(kind, soon);
  events.addEventListener('open', soon);
  // Somebody who may not read the log still sees the page, every few seconds.
  events.addEventListener('error', () => { if (events.readyState === 2) setTimeout(listen, HIDDEN); });
}

document.addEventListener('visibilitychange', soon);
document.documentElement.classList.add('live');
reachable(document);
listen();
plan(SOON);

// The choice of a time range for all charts of a screen. It is kept in the address.
import { html } from "../vendor.js";
import { time } from "../core/format.js";
import { route, link, setQuery } from "../core/router.js";
import { clock, parseClock, zoneName } from "../core/time-zone.js";
import { Field, copyText } from "./parts.js";
import { RANGES, currentRange } from "./series.js";

export const showRange = (start, end) => setQuery({ from: Math.floor(start), to: Math.ceil(end) });
export const endZoom = () => setQuery({ from: undefined, to: undefined });

export function TimeRange() {
  const { id, start, end, seconds } = currentRange();
  return html`<div class="row">${start ? html`<${Exact} start=${start} end=${end} />` : html`<button class="link" onClick=${() => showRange(Date.now() / 1000 - seconds, Date.now() / 1000)}>Enter times</button>`}
    <button class="link" onClick=${() => copyText(exactAddress(start, end, seconds), "The link to this time range")}>Copy link</button><span class="sp"></span>
    <div class="seg" role="group" aria-label="Time range">${RANGES.map((range) => html`
      <button key=${range.id} aria-pressed=${!start && range.id === id} onClick=${() => setQuery({ range: range.id, from: undefined, to: undefined })}>${range.label}</button>`)}</div></div>`;
}

// Begin and end as a person enters them, for those who do not drag over a chart.
function Exact({ start, end }) {
  const set = (apply) => (event) => {
    const at = parseClock(event.target.value);
    if (at) apply(at);
  };
  return html`<${Field} label=${`From (${zoneName()})`}><input type="datetime-local" step="1" value=${clock(start)} onChange=${set((at) => showRange(at, Math.max(end, at + 60)))} /><//>
    <${Field} label="To"><input type="datetime-local" step="1" value=${clock(end)} onChange=${set((at) => showRange(Math.min(start, at - 60), at))} /><//>
    <button class="btn" onClick=${endZoom}>Back to the latest</button>`;
}

// A link shows others the same time, also later.
function exactAddress(start, end, seconds) {
  const { screen, parts, query } = route.value;
  const now = Math.floor(Date.now() / 1000);
  return new URL(link(screen, parts, { ...query, from: start ?? now - seconds, to: end ?? now }), location.href).href;
}

// Labels of an axis: seconds, minutes or days, with the date where a day begins.
export function axisLabels(times) {
  const step = times.length > 1 ? times[1] - times[0] : 60;
  return times.map((at, index) => {
    const [day, clockTime] = time(at, { date: true }).split(" ");
    if (step >= 86400) return day.slice(5);
    if (clockTime === "00:00:00" || (index === 0 && step >= 7200)) return `${day.slice(5)}\n${clockTime.slice(0, 5)}`;
    return clockTime.slice(0, step < 60 ? 8 : 5);
  });
}

// Places of the batch over the steps, under both policies.
import { html } from "../vendor.js";
import { plural } from "../core/format.js";
import { Box, Figure, colorOf, findRuns } from "./drawing.js";

const ROW = 22, LABEL = 64;
const POLICIES = [["static", "Static batching"], ["continuous", "Continuous batching"]];

export function Batching({ frames, index }) {
  const shown = frames.slice(0, index + 1);
  return html`<div>${POLICIES.map(([policy, title]) => {
    const { waiting } = shown.at(-1)[policy];
    const text = waiting.length ? `waiting: ${waiting.join(", ")}` : "nobody waits";
    return html`<div key=${policy}><h3>${title} <span class="s">${text}</span></h3>
      <${Figure} label=${`${title} after ${plural(shown.length, "step")}; ${text}`} draw=${(width) => drawPlaces(shown.map((frame) => frame[policy]), frames.length, width)} /></div>`;
  })}<p class="s">Each row is a place in the batch, and each number the request in it. A step that computes a prompt has a bar at its top. Hatched: the place is empty.</p></div>`;
}

function drawPlaces(lanes, total, width) {
  const step = (width - LABEL) / total;
  const content = lanes[0].slots.map((_, place) => {
    const y = place * (ROW + 2) + 1;
    const numbers = lanes.map(({ slots }) => slots[place]);
    const begins = lanes.map(({ slots, prefills }) => slots[place] > 0 && prefills.includes(slots[place]));
    return html`<g key=${place}><text x="0" y=${y + 15}>place ${place + 1}</text>
      ${findRuns(numbers).map(({ from, to, value }) => (value
        ? html`<${Box} key=${from} x=${LABEL + from * step} y=${y} width=${(to - from) * step} height=${ROW} color=${colorOf(value)} text=${String(value)} />`
        : html`<rect key=${from} x=${LABEL + from * step} y=${y} width=${(to - from) * step} height=${ROW} fill="url(#hatch)" />`))}
      ${begins.map((isPrefill, at) => (isPrefill ? html`<rect key=${`p${at}`} x=${LABEL + at * step} y=${y} width=${Math.max(1, step - 1)} height="5" fill=${colorOf(numbers[at])} />` : null))}</g>`;
  });
  return { height: lanes[0].slots.length * (ROW + 2) + 4, content };
}

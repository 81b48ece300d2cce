// A limit, a budget and a token bucket at one moment, and which requests were admitted so far.
import { html } from "../vendor.js";
import { partOf, plural } from "../core/format.js";
import { Figure, Gauge } from "./drawing.js";

const GAUGE = 48, ROW = 26;
const MIDNIGHT_AFTER_S = 120;
const ROWS = [["outcome", "Argosy"], ["bucket_outcome", "A token bucket alone"]];

export function Limits({ frames, index, values }) {
  const frame = frames[index], shown = frames.slice(0, index + 1);
  const { limit_tokens: limit, budget_tokens: budget } = values;
  const gauges = [
    { label: "Limit of a minute", value: frame.window_tokens, most: limit, text: `${partOf(frame.window_tokens, limit, "token")} taken` },
    { label: "Budget of the day", value: frame.budget_tokens, most: budget, text: `${partOf(frame.budget_tokens, budget, "token")} taken` },
    { label: "Token bucket", value: frame.bucket_tokens, most: limit, text: `${plural(Math.floor(frame.bucket_tokens), "token")} left` },
    { label: "Bucket: last minute", value: frame.bucket_minute_tokens, most: 2 * limit, mark: limit, text: `${plural(frame.bucket_minute_tokens, "token")}${frame.bucket_minute_tokens > limit ? ", over the limit" : ""}` },
  ];
  return html`<div><${Figure} label=${gauges.map(({ label, text }) => `${label}: ${text}`).join("; ")}
      draw=${(width) => ({ height: gauges.length * GAUGE, content: gauges.map((gauge, at) => html`<${Gauge} key=${gauge.label} ...${gauge} y=${at * GAUGE} width=${width} color=${at > 1 ? "var(--s5)" : "var(--s1)"} />`) })} />
    <h3>Requests</h3>
    <${Figure} label=${ROWS.map(([field, name]) => `${name}: ${shown.filter((one) => one[field] === "admitted").length} admitted, ${shown.filter((one) => one[field] === "rejected").length} rejected`).join("; ")}
      draw=${(width) => drawRequests(shown, frames.length, width)} />
    <p class="s">Tall bar: admitted. Cross: rejected. The dashed line is midnight, when a new budget begins.</p></div>`;
}

function drawRequests(shown, total, width) {
  const at = (second) => 4 + (second / total) * (width - 8);
  const midnight = at(MIDNIGHT_AFTER_S);
  const content = html`<g><line x1=${midnight} x2=${midnight} y1="0" y2=${2 * (ROW + 20)} stroke="var(--fg2)" stroke-dasharray="3 3" />
    ${ROWS.map(([field, name], row) => html`<g key=${field}><text x="0" y=${row * (ROW + 20) + 14}>${name}</text>${shown.map((frame) => drawMark(frame[field], at(frame.second), row * (ROW + 20) + 20, frame.second))}</g>`)}</g>`;
  return { height: 2 * (ROW + 20), content };
}

function drawMark(outcome, x, y, key) {
  if (outcome === "admitted") return html`<line key=${key} x1=${x} x2=${x} y1=${y} y2=${y + 18} stroke="var(--ok)" stroke-width="2" />`;
  if (outcome === "rejected") return html`<path key=${key} d=${`M${x - 3} ${y + 10}l6 6m0 -6l-6 6`} stroke="var(--bad)" stroke-width="1.6" />`;
  return null;
}

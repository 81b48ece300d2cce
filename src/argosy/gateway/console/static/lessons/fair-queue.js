// Order in which requests of three tenants get a slot, by fair shares and by arrival, and the tokens that each got.
import { html } from "../vendor.js";
import { count, plural } from "../core/format.js";
import { Box, Figure, Gauge, colorOf } from "./drawing.js";

const TENANTS = ["A", "B", "C"];
const ROW = 24, GAUGE = 44;

export function FairQueue({ frames, index, values }) {
  const shown = frames.slice(0, index + 1), frame = frames[index];
  const weights = [1, values.weight, 1];
  const most = Math.max(...frames.at(-1).served_tokens.map((tokens, tenant) => tokens / weights[tenant]));
  return html`<div><${Figure} label=${`Order of ${plural(shown.length, "request")}: ${shown.map(({ served }) => TENANTS[served]).join("")} by fair shares, ${shown.map(({ fifo_served: served }) => TENANTS[served]).join("")} by arrival`}
      draw=${(width) => ({ height: 108, content: html`<g><text x="0" y="14">Argosy: fair shares</text>${drawOrder(shown, "served", 20, frames.length, width)}
        <text x="0" y="68">In the order of arrival</text>${drawOrder(shown, "fifo_served", 74, frames.length, width)}</g>` })} />
    <h3>Tokens per weight so far</h3>
    <${Figure} label=${TENANTS.map((name, tenant) => `${name} ${count(frame.served_tokens[tenant] / weights[tenant])}`).join(", ")}
      draw=${(width) => ({ height: TENANTS.length * GAUGE, content: TENANTS.map((name, tenant) => html`<${Gauge} key=${name} y=${tenant * GAUGE} width=${width} color=${colorOf(tenant + 1)} most=${most}
        label=${`Tenant ${name}, weight ${weights[tenant]}`} value=${frame.served_tokens[tenant] / weights[tenant]} text=${`${count(frame.served_tokens[tenant] / weights[tenant])} tokens, ${frame.waiting[tenant]} waiting`} />`) })} /></div>`;
}

function drawOrder(shown, field, y, total, width) {
  const step = width / total;
  return shown.map((frame, at) => html`<${Box} key=${at} x=${at * step} y=${y} width=${step} height=${ROW} color=${colorOf(frame[field] + 1)} text=${TENANTS[frame[field]]} />`);
}

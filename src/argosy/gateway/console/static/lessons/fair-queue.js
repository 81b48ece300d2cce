// Order in which requests of three tenants get a slot, by fair shares and by arrival, and the tokens that each got.
import { html } from "../vendor.js";
import { count, plural } from "../core/format.js";
import { Box, Figure, Gauge, colorOf } from "./drawing.js";

const TENANTS = ["A", "B", "C"];
const ROW = 24, CELL = 20, LINE = 28, GAUGE = 44;
const ORDERS = [["served", "Argosy: fair shares"], ["fifo_served", "In the order of arrival"]];

export function FairQueue({ frames, index, values }) {
  const shown = frames.slice(0, index + 1), frame = frames[index];
  const weights = [1, values.weight, 1];
  const share = ({ served_tokens: served }, tenant) => served[tenant] / weights[tenant];
  // The scale ends where only one tenant is left, whose service then no longer concerns the others.
  const contested = frames.findLast(({ waiting }) => waiting.filter((number) => number).length > 1) ?? frames[0];
  const most = Math.max(...TENANTS.map((_, tenant) => share(contested, tenant)));
  return html`<div>${ORDERS.map(([field, title]) => html`<div key=${field}><h3>${title}</h3>
      <${Figure} label=${`${title}: ${shown.map((one) => TENANTS[one[field]]).join(" ")}`} draw=${(width) => drawOrder(shown.map((one) => one[field]), frames.length, width)} /></div>`)}
    <h3>Tokens per weight so far</h3>
    <${Figure} label=${TENANTS.map((name, tenant) => `${name} ${count(share(frame, tenant))}`).join(", ")}
      draw=${(width) => ({ height: TENANTS.length * GAUGE, content: TENANTS.map((name, tenant) => html`<${Gauge} key=${name} y=${tenant * GAUGE} width=${width} color=${colorOf(tenant + 1)} most=${most}
        label=${`Tenant ${name}, weight ${weights[tenant]}`} value=${share(frame, tenant)} text=${`${plural(share(frame, tenant), "token")}, ${frame.waiting[tenant]} waiting`} />`) })} /></div>`;
}

function drawOrder(tenants, total, width) {
  const columns = Math.max(1, Math.floor(width / CELL));
  const content = tenants.map((tenant, at) => html`<${Box} key=${at} x=${(at % columns) * CELL + 1} y=${Math.floor(at / columns) * LINE + 1} width=${CELL - 2} height=${ROW} color=${colorOf(tenant + 1)} text=${TENANTS[tenant]} />`);
  return { height: Math.ceil(total / columns) * LINE, content };
}

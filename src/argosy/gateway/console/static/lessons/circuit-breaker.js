// Breakers of a pool's replicas over time, with what each replica got.
import { html } from "../vendor.js";
import { duration, plural } from "../core/format.js";
import { Pill } from "../ui/parts.js";
import { Figure, findRuns } from "./drawing.js";

const ROW = 24, LABEL = 28;

export function CircuitBreaker({ frames, index }) {
  const shown = frames.slice(0, index + 1);
  const { replicas, at_s: now } = frames[index];
  return html`<div><${Figure} label=${`Breakers after ${duration(now)}: ${replicas.map((one) => `${one.name} ${nameState(one)[1]}`).join(", ")}`} draw=${(width) => drawReplicas(shown, frames.length, width)} />
    <p class="s">Plain: the breaker is closed. Hatched: it is open. The red line is the time for which the replica fails.</p>
    <ul class="leg">${replicas.map((one) => html`<li key=${one.name}><${Pill} kind=${nameState(one)[0]}>${one.name} ${nameState(one)[1]}<//> ${plural(one.sent, "request")}, ${one.failed} failed</li>`)}</ul></div>`;
}

function nameState({ open_s: open, is_eligible: isEligible, is_failing: isFailing }) {
  if (open !== null) return [isEligible ? "warn" : "bad", `open for ${duration(open)}${isEligible ? ", in use" : ""}`];
  return isFailing ? ["warn", "closed, failing"] : ["ok", "closed"];
}

function drawReplicas(shown, total, width) {
  const step = (width - LABEL) / total;
  const content = shown[0].replicas.map(({ name }, row) => {
    const y = row * (ROW + 12) + 1;
    const states = shown.map(({ replicas }) => replicas[row]);
    return html`<g key=${name}><text x="0" y=${y + 16}>${name}</text>
      ${findRuns(states.map(({ open_s: open }) => open !== null)).map(({ from, to, value }) => html`<rect key=${`s${from}`} x=${LABEL + from * step} y=${y} width=${(to - from) * step} height=${ROW} fill=${value ? "url(#hatch)" : "var(--okbg)"} stroke=${value ? "var(--bad)" : "var(--ok)"} />`)}
      ${findRuns(states.map(({ is_failing: isFailing }) => isFailing)).map(({ from, to, value }) => (value ? html`<rect key=${`f${from}`} x=${LABEL + from * step} y=${y + ROW + 2} width=${(to - from) * step} height="4" fill="var(--bad)" />` : null))}</g>`;
  });
  return { height: shown[0].replicas.length * (ROW + 12), content };
}

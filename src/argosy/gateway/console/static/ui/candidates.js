// The replicas that may get a request, with their predicted cost in seconds by part.
import { html } from "../vendor.js";
import { count, duration, visible } from "../core/format.js";

const PARTS = [["queue_s", "Queue", "s2"], ["prefill_s", "Prefill", "s3"], ["decode_s", "Decode", "s1"], ["memory_s", "Memory", "s4"], ["stale_s", "Old report", "s6"], ["adapter_s", "Adapter", "s5"]];

export function Candidates({ label, candidates, chosen }) {
  const hasCache = candidates.some((each) => each.cached_tokens !== undefined);
  return html`<div class="rows" tabindex="0" role="region" aria-label=${label}><table><thead><tr><th scope="col">Replica</th>
    ${hasCache ? html`<th scope="col" class="n">Cached tokens</th>` : null}${PARTS.map(([key, name]) => html`<th key=${key} scope="col" class="n">${name}</th>`)}<th scope="col" class="n">Cost</th></tr></thead>
    <tbody>${candidates.map((each) => html`<tr key=${each.replica}><td>${each.replica === chosen ? html`<b>${visible(each.replica)}</b>` : visible(each.replica)}</td>
      ${hasCache ? html`<td class="n">${count(each.cached_tokens)}</td>` : null}
      ${PARTS.map(([key]) => html`<td key=${key} class="n">${duration(each[key])}</td>`)}<td class="n">${duration(each.total_s)}</td></tr>`)}</tbody></table></div>`;
}

// The same as stacked bars, divided by the weight of the replica. The table has the numbers.
export function CostBars({ candidates, chosen }) {
  const longest = Math.max(...candidates.map(totalOf), 1e-9);
  return html`<div class="costs" aria-hidden="true">${candidates.map((each) => {
    let left = 0;
    return [
      html`<span key=${`${each.replica}-name`} class="s">${each.replica === chosen ? html`<b>${visible(each.replica)}</b>` : visible(each.replica)}</span>`,
      html`<svg key=${each.replica} viewBox="0 0 100 4" preserveAspectRatio="none">${PARTS.map(([key, , color]) => {
        const width = (each[key] / each.weight / longest) * 100, x = left;
        left += width;
        return html`<rect key=${key} x=${x} y="0" width=${width} height="4" fill=${`var(--${color})`} />`;
      })}</svg>`,
    ];
  })}</div><div class="leg" aria-hidden="true">${PARTS.map(([key, name, color]) => html`<span key=${key}><i style=${{ borderColor: `var(--${color})` }}></i>${name}</span>`)}</div>`;
}

const totalOf = (candidate) => PARTS.reduce((sum, [key]) => sum + candidate[key] / candidate.weight, 0);

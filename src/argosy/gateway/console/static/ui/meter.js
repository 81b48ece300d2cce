// A bar that fills towards a threshold. E-values multiply, so the bar is logarithmic.
import { html } from "../vendor.js";
import { significant } from "../core/format.js";

const filled = (value, threshold) => Math.min(1, Math.max(0, Math.log(Math.max(value, 1)) / Math.log(threshold)));

// A value without a bound in JSON, which is null, has passed every threshold.
export function Meter({ label, value, threshold, kind }) {
  const shown = value ?? Infinity;
  const text = `${shown >= threshold ? `${significant(threshold)} or more` : significant(shown, 2)} of ${significant(threshold)}`;
  return html`<span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(100 * filled(shown, threshold))} aria-valuetext=${text}>
    <span class="bar"><i class=${kind} style=${{ width: `${100 * filled(shown, threshold)}%` }}></i></span><span>${text}</span></span>`;
}

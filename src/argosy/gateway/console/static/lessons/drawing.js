// Parts of the lessons' pictures. They are drawn at the width of the page, so that their text keeps its size.
import { html, useEffect, useRef, useState } from "../vendor.js";

// An SVG of the width of its container. `draw(width)` returns its height and content.
export function Figure({ label, draw }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const { height, content } = width ? draw(width) : { height: 120, content: null };
  return html`<div ref=${box}><svg class="pic" role="img" aria-label=${label} width=${width} height=${height}>
    <defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--bg)" /><line x1="0" y1="0" x2="0" y2="6" stroke="var(--edge)" stroke-width="2" /></pattern></defs>
    ${content}</svg></div>`;
}

export const colorOf = (number) => `var(--s${1 + ((number - 1) % 6)})`;

// Neighbours with the same value, as [{ from, to, value }] with `to` after the last one.
export function findRuns(values) {
  const runs = [];
  values.forEach((value, index) => {
    const last = runs.at(-1);
    if (last && last.value === value) last.to = index + 1;
    else runs.push({ from: index, to: index + 1, value });
  });
  return runs;
}

// A box with a text that is left out where it does not fit.
export const Box = ({ x, y, width, height, color, text = "", isSolid = false }) => html`<g>
  <rect x=${x} y=${y} width=${Math.max(1, width - 1)} height=${height} rx="2" fill=${color} fill-opacity=${isSolid ? 0.55 : 0.2} stroke=${color} />
  ${text && width > 7 * text.length + 2 ? html`<text x=${x + width / 2} y=${y + height / 2 + 4} text-anchor="middle">${text}</text>` : null}</g>`;

// A bar with its value as text. `mark` is a limit that is drawn as a line.
export function Gauge({ y, width, label, value, most, mark, text, color }) {
  const at = (amount) => Math.min(1, amount / Math.max(most, 1)) * (width - 2);
  return html`<g><text x="0" y=${y + 12}>${label}</text><text x=${width} y=${y + 12} text-anchor="end">${text}</text>
    <rect x="1" y=${y + 18} width=${width - 2} height="14" rx="2" fill="none" stroke="var(--edge)" />
    <rect x="1" y=${y + 18} width=${at(value)} height="14" rx="2" fill=${value > mark ? "var(--bad)" : color} />
    ${mark === undefined ? null : html`<line x1=${1 + at(mark)} x2=${1 + at(mark)} y1=${y + 14} y2=${y + 36} stroke="var(--fg)" stroke-width="2" />`}</g>`;
}

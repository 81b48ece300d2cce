// A table that keeps only the visible rows in the page. Rows have a fixed height; two empty rows stand for the others.
import { html, useMemo, useRef, useState } from "../vendor.js";
import { isoTime, plural, time } from "../core/format.js";
import { zoneName } from "../core/time-zone.js";
import { saveCsv } from "./parts.js";

const ROW_PX = 31;
const SPARE_ROWS = 8;

// A column of times in seconds, which is shown and saved in the chosen zone.
export const timeColumn = (key, label) => ({ key, label, isTime: true, value: (row) => row[key], cell: (row) => time(row[key], { date: true }) });

// columns: [{ key, label, value(row), cell?(row), isNumber?, isTime? }]
export function Table({ label, columns, rows, rowKey, height = 480, csv, initialSort = null, more }) {
  const [sort, setSort] = useState(initialSort);
  const [top, setTop] = useState(0);
  const region = useRef(null);
  const sorted = useMemo(() => {
    const column = sort && columns.find(({ key }) => key === sort.key);
    if (!column) return rows;
    const order = sort.isDescending ? -1 : 1;
    return [...rows].sort((a, b) => order * compare(column.value(a), column.value(b)));
  }, [rows, sort]);
  const first = Math.max(0, Math.floor(top / ROW_PX) - SPARE_ROWS);
  const last = Math.min(sorted.length, Math.ceil((top + height) / ROW_PX) + SPARE_ROWS);
  const press = (key) => setSort((before) => (before?.key === key ? { key, isDescending: !before.isDescending } : { key, isDescending: false }));
  const spacer = (count, key) => (count ? html`<tr key=${key} aria-hidden="true" style=${{ height: `${count * ROW_PX}px` }}><td colspan=${columns.length}></td></tr>` : null);
  return html`<div>
    <div class="rows" ref=${region} role="region" aria-label=${label} tabindex="0" style=${{ maxHeight: `${height}px` }}
      onScroll=${(event) => setTop(event.currentTarget.scrollTop)}>
      <table aria-rowcount=${sorted.length + 1}><thead><tr aria-rowindex="1">${columns.map((column) => html`
        <th key=${column.key} scope="col" class=${column.isNumber ? "n" : ""}
          aria-sort=${sort?.key === column.key ? (sort.isDescending ? "descending" : "ascending") : "none"}>
          ${column.label ? html`<button class="sort" onClick=${() => press(column.key)}>${column.label}${column.isTime ? ` (${zoneName()})` : ""}${sort?.key === column.key ? (sort.isDescending ? " ↓" : " ↑") : ""}</button>` : html`<span class="sr">Actions</span>`}</th>`)}</tr></thead>
      <tbody>${spacer(first, "above")}${sorted.slice(first, last).map((row, index) => html`
        <tr key=${rowKey(row)} aria-rowindex=${first + index + 2}>${columns.map((column) => html`
          <td key=${column.key} class=${column.isNumber ? "n" : ""}>${column.cell ? column.cell(row) : column.value(row)}</td>`)}</tr>`)}
      ${spacer(sorted.length - last, "below")}</tbody></table>
    </div>
    <p class="s tail">${plural(sorted.length, "row")}${" "}
      ${csv ? html`<button class="link" onClick=${() => saveCsv(csv, columns.map(({ key }) => key), sorted.map((row) => columns.map((column) => (column.isTime ? isoTime(column.value(row)) : column.value(row)))))}>Save as CSV</button>` : null}
      ${more}</p></div>`;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

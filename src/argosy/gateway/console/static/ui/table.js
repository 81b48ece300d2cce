// A table that keeps only the visible rows in the page. Rows have a fixed height; two empty rows stand for the others.
import { html, useMemo, useRef, useState } from "../vendor.js";
import { isoTime, plural, time, visible } from "../core/format.js";
import { route, setQuery } from "../core/router.js";
import { zoneName } from "../core/time-zone.js";
import { Action, saveCsv } from "./parts.js";

const ROW_PX = 31;
const SPARE_ROWS = 8;

// A column of times in seconds, which is shown and saved in the chosen zone.
export const timeColumn = (key, label) => ({ key, label, isTime: true, value: (row) => row[key], cell: (row) => time(row[key], { date: true }) });

const sortName = (label) => `sort_${label.toLowerCase().replaceAll(/[^a-z]+/g, "_")}`;

// The order of a table, which is kept in the address: { key, isDescending }.
export function currentSort(label, initial = null) {
  const text = route.value.query[sortName(label)];
  return text ? { key: text.replace(/^-/, ""), isDescending: text.startsWith("-") } : initial;
}

// columns: [{ key, label, value(row), cell?(row), isNumber?, isTime?, isSorted? }]. With `pages` the gateway sorts, by the columns
// that have `isSorted`, and further rows are read when the last ones are in sight.
export function Table({ label, columns, rows, rowKey, height = 480, csv, initialSort = null, more, pages }) {
  const sort = currentSort(label, initialSort);
  const [top, setTop] = useState(0);
  const region = useRef(null);
  const sorted = useMemo(() => {
    const column = !pages && sort && columns.find(({ key }) => key === sort.key);
    if (!column) return rows;
    const order = sort.isDescending ? -1 : 1;
    return [...rows].sort((a, b) => order * compare(column.value(a), column.value(b)));
  }, [rows, sort?.key, sort?.isDescending]);
  const first = Math.max(0, Math.floor(top / ROW_PX) - SPARE_ROWS);
  const last = Math.min(sorted.length, Math.ceil((top + height) / ROW_PX) + SPARE_ROWS);
  const press = (key) => setQuery({ [sortName(label)]: `${sort?.key === key ? (sort.isDescending ? "" : "-") : pages ? "-" : ""}${key}` });
  const scroll = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    setTop(scrollTop);
    if (pages?.hasMore && scrollHeight - scrollTop - clientHeight < 20 * ROW_PX) pages.readMore();
  };
  const spacer = (count, key) => (count ? html`<tr key=${key} aria-hidden="true" style=${{ height: `${count * ROW_PX}px` }}><td colspan=${columns.length}></td></tr>` : null);
  return html`<div>
    <div class="rows" ref=${region} role="region" aria-label=${label} tabindex="0" style=${{ maxHeight: `${height}px` }}
      onScroll=${scroll}>
      <table aria-rowcount=${pages?.hasMore ? -1 : sorted.length + 1}><thead><tr aria-rowindex="1">${columns.map((column) => html`
        <th key=${column.key} scope="col" class=${column.isNumber ? "n" : ""}
          aria-sort=${sort?.key === column.key ? (sort.isDescending ? "descending" : "ascending") : "none"}>
          ${heading(column, sort, !pages || column.isSorted, press)}</th>`)}</tr></thead>
      <tbody>${spacer(first, "above")}${sorted.slice(first, last).map((row, index) => html`
        <tr key=${rowKey(row)} aria-rowindex=${first + index + 2}>${columns.map((column) => html`
          <td key=${column.key} class=${column.isNumber ? "n" : ""}>${show(column.cell ? column.cell(row) : column.value(row))}</td>`)}</tr>`)}
      ${spacer(sorted.length - last, "below")}</tbody></table>
    </div>
    <p class="s tail">${pages?.hasMore ? `The first ${plural(sorted.length, "row")}` : plural(sorted.length, "row")}${" "}
      ${csv ? html`<button class="link" onClick=${() => saveCsv(csv, columns.map(({ key }) => key), sorted.map((row) => columns.map((column) => (column.isTime ? isoTime(column.value(row)) : column.value(row)))))}>Save${pages?.hasMore ? " these" : ""} as CSV</button>` : null}
      ${pages ? html`<${PageState} pages=${pages} />` : null}${more}</p></div>`;
}

function heading({ key, label, isTime }, sort, canSort, press) {
  if (!label) return html`<span class="sr">Actions</span>`;
  const text = `${label}${isTime ? ` (${zoneName()})` : ""}${sort?.key === key ? (sort.isDescending ? " ↓" : " ↑") : ""}`;
  return canSort ? html`<button class="sort" onClick=${() => press(key)}>${text}</button>` : text;
}

function PageState({ pages: { hasMore, searchedFrom, failure, readMore, readLatest } }) {
  return html`${searchedFrom ? ` Searched back to ${time(searchedFrom, { date: true })}. ` : ""}${failure ? html` <span class="failure">${failure}</span> ` : null}
    ${hasMore ? html` <${Action} run=${readMore}>More rows<//>` : null}${readLatest ? html` New rows are not shown now. <button class="link" onClick=${readLatest}>Show the latest</button>` : null}`;
}

const show = (content) => (typeof content === "string" ? visible(content) : content);

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

// A line chart over time. uPlot draws it; its arrays are no state of a component.
import { html, signal, uPlot, useEffect, useMemo, useRef } from "../vendor.js";
import { color, isDark } from "../core/theme.js";
import { isoTime, time } from "../core/format.js";
import { isUtc } from "../core/time-zone.js";
import { MarkButtons, MarkList, useMarks } from "./marks.js";
import { save, saveCsv } from "./parts.js";
import { axisLabels, endZoom, showRange } from "./time-range.js";

const HEIGHT = 200;
const MARK_COLORS = { deploy: "accent", failure: "bad", change: "fg2" };

// series: [{ label, color }]. data: [times, ...values]; a null is a gap. The axis reaches at least to `least`. Dragging over the chart sets the time range of the screen, and a double click ends that.
export function Chart({ title, series, data, format, version, limit, label, least = 1e-9 }) {
  const box = useRef(null);
  const plot = useRef(null);
  const { index, area } = useMemo(() => ({ index: signal(null), area: signal(null) }), []);
  const marks = useMarks();
  const drawnMarks = useRef(marks);
  drawnMarks.current = marks;
  const dark = isDark.value, zone = isUtc.value;
  useEffect(() => {
    const axis = { stroke: color("fg2"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const u = new uPlot({
      width: Math.floor(box.current.clientWidth), height: HEIGHT, legend: { show: false },
      tzDate: (at) => (zone ? uPlot.tzDate(new Date(at * 1000), "Etc/UTC") : new Date(at * 1000)),
      cursor: { sync: { key: "time" }, y: false, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { endZoom(); return null; } } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, limit?.value ?? 0, least)] } },
      axes: [
        { ...axis, size: 32, values: (_, times) => axisLabels(times) },
        { ...axis, size: 64, values: (_, values) => values.map((value) => format(value)) },
      ],
      series: [{}, ...series.map((each) => ({ label: each.label, stroke: color(each.color), width: 1.6, spanGaps: false, points: { show: false, filter: findSingle, size: 5, fill: color(each.color) } }))],
      hooks: {
        draw: [(self) => drawLines(self, limit, drawnMarks.current), (self) => updateArea(self, area)],
        setCursor: [(self) => { index.value = self.cursor.idx ?? null; }],
        setSelect: [zoom],
      },
    }, data, box.current);
    plot.current = u;
    let frame = 0, width = box.current.clientWidth;
    const observer = new ResizeObserver(([entry]) => {
      const next = Math.floor(entry.contentRect.width);
      if (next === width || !next) return;
      width = next;
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => u.setSize({ width: next, height: HEIGHT }));
    });
    observer.observe(box.current.parentElement);
    return () => { observer.disconnect(); cancelAnimationFrame(frame); u.destroy(); plot.current = null; };
  }, [dark, zone, series.map((each) => each.label).join(), limit?.value]);
  useEffect(() => {
    const frame = requestAnimationFrame(() => plot.current?.setData(data));
    return () => cancelAnimationFrame(frame);
  }, [data, version, marks]);
  return html`<div class="chart">
    <div class="plot"><div role="img" aria-label=${label ?? title}><div ref=${box} style=${{ minHeight: `${HEIGHT}px` }}></div></div><${Marked} of=${MarkButtons} marks=${marks} area=${area} /></div>
    <${Legend} series=${series} data=${data} format=${format} index=${index}>
      <button class="link" onClick=${() => saveCsv(`${title}.csv`, ["time", ...series.map((each) => each.label)], data[0].map((at, row) => [isoTime(at), ...series.map((_, column) => data[column + 1][row])]))}>CSV</button>
      <button class="link" onClick=${() => plot.current.ctx.canvas.toBlob((blob) => save(`${title}.png`, blob))}>PNG</button><//>
    <${Marked} of=${MarkList} marks=${marks} area=${area} /></div>`;
}

// The values between gaps, which are no part of a line and so are drawn as points.
function findSingle({ data }, series) {
  const values = data[series];
  const isGap = (index) => values[index] === null || values[index] === undefined;
  return [...values.keys()].filter((index) => !isGap(index) && isGap(index - 1) && isGap(index + 1));
}

// The values under the cursor, which all charts share, or the latest ones. Their places have a fixed size.
function Legend({ series, data, format, index, children }) {
  const at = index.value;
  const pick = (values) => (at === null ? values?.findLast((value) => value !== null && value !== undefined) : values?.[at]);
  return html`<div class="leg"><span class="at">${at === null || data[0][at] === undefined ? "latest" : time(data[0][at], { date: true })}</span>
    ${series.map((each, position) => html`<span key=${each.label}><i style=${{ borderColor: `var(--${each.color})` }}></i>${each.label} <b>${format(pick(data[position + 1]))}</b></span>`)}
    <span class="sp"></span>${children}</div>`;
}

// Reads the place of the plot apart from the chart, which does not change with it.
const Marked = ({ of: Part, marks, area }) => html`<${Part} marks=${marks} area=${area.value} />`;

function drawLines({ ctx, bbox, valToPos, scales: { x } }, limit, marks) {
  const { left, top, width, height } = bbox;
  const line = (tone, dash, x1, y1, x2, y2) => {
    ctx.strokeStyle = color(tone);
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
  };
  ctx.save();
  if (limit !== undefined) {
    const y = valToPos(limit.value, "y", true);
    line("fg2", [3, 3], left, y, left + width, y);
  }
  for (const { at, kind } of marks) {
    if (!(at >= x.min && at <= x.max)) continue;
    const position = valToPos(at, "x", true);
    line(MARK_COLORS[kind], [1, 3], position, top, position, top + height);
  }
  ctx.restore();
}

function updateArea({ bbox, scales: { x } }, area) {
  const next = { left: bbox.left / uPlot.pxRatio, width: bbox.width / uPlot.pxRatio, start: x.min, end: x.max };
  if (Object.keys(next).some((key) => next[key] !== area.value?.[key])) area.value = Number.isFinite(x.min) ? next : null;
}

// The charts of a group all get the selection; the one under the pointer sets the range.
function zoom(self) {
  const { left, width } = self.select;
  self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (self.cursor.event && width >= 4) showRange(self.posToVal(left, "x"), self.posToVal(left + width, "x"));
}

// A small line without axes.
export function Sparkline({ values, tone = "s1" }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return html`<svg class="spark" aria-hidden="true"></svg>`;
  const high = Math.max(...known, 1e-9);
  let path = "", isDown = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${((index / (values.length - 1)) * 100).toFixed(1)} ${(27 - (value / high) * 25).toFixed(1)}`;
    isDown = true;
  });
  return html`<svg class="spark" viewBox="0 0 100 28" preserveAspectRatio="none" aria-hidden="true">
    <path d=${path} fill="none" stroke=${`var(--${tone})`} stroke-width="1.5" vector-effect="non-scaling-stroke" /></svg>`;
}

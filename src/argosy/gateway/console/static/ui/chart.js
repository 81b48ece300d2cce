// A line chart over time. uPlot draws it; its arrays are no state of a component.
import { html, uPlot, useEffect, useRef } from "../vendor.js";
import { color, isDark } from "../core/theme.js";
import { time } from "../core/format.js";
import { save, saveCsv } from "./parts.js";

const HEIGHT = 200;

// series: [{ label, color }]. data: [times, ...values]; a null is a gap. The axis reaches at least to `least`. `hasPoints` shows
// values between gaps.
export function Chart({ title, series, data, format, version, limit, label, least = 1e-9, hasPoints = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const dark = isDark.value;
  useEffect(() => {
    const axis = { stroke: color("fg2"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const drawLimit = (u) => {
      if (limit === undefined) return;
      const y = u.valToPos(limit.value, "y", true);
      u.ctx.save();
      u.ctx.strokeStyle = color("fg2");
      u.ctx.setLineDash([3, 3]);
      u.ctx.beginPath();
      u.ctx.moveTo(u.bbox.left, y);
      u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
      u.ctx.stroke();
      u.ctx.restore();
    };
    const u = new uPlot({
      width: Math.floor(box.current.clientWidth), height: HEIGHT, legend: { show: false },
      cursor: { sync: { key: "time" }, y: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, limit?.value ?? 0, least)] } },
      axes: [
        { ...axis, values: (_, times) => times.map((at) => time(at).slice(0, times.length > 1 && times[1] - times[0] < 60 ? 8 : 5)) },
        { ...axis, size: 64, values: (_, values) => values.map((value) => format(value)) },
      ],
      series: [{}, ...series.map((each) => ({ label: each.label, stroke: color(each.color), width: 1.6, spanGaps: false, points: { show: hasPoints, size: 4, fill: color(each.color) } }))],
      hooks: { draw: [drawLimit] },
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
  }, [dark, series.map((each) => each.label).join(), limit?.value]);
  useEffect(() => {
    const frame = requestAnimationFrame(() => plot.current?.setData(data));
    return () => cancelAnimationFrame(frame);
  }, [data, version]);
  const last = (index) => data[index + 1]?.findLast((value) => value !== null && value !== undefined);
  return html`<div class="chart">
    <div class="leg">${series.map((each, index) => html`<span key=${each.label}><i style=${{ borderColor: `var(--${each.color})` }}></i>${each.label} <b>${format(last(index))}</b></span>`)}
      <span class="sp"></span>
      <button class="link" onClick=${() => saveCsv(`${title}.csv`, ["time", ...series.map((each) => each.label)], data[0].map((at, row) => [new Date(at * 1000).toISOString(), ...series.map((_, index) => data[index + 1][row])]))}>CSV</button>
      <button class="link" onClick=${() => plot.current.ctx.canvas.toBlob((blob) => save(`${title}.png`, blob))}>PNG</button></div>
    <div role="img" aria-label=${label ?? title}><div ref=${box} style=${{ minHeight: `${HEIGHT}px` }}></div></div></div>`;
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

// Learn: simulations with the product's own code. A lesson is data: its controls, plots and figures are drawn alike.
import { html, useEffect, useRef, useState } from "../vendor.js";
import { useResource } from "../core/api.js";
import { count, duration, exact, MISSING } from "../core/format.js";
import { link, route, setQuery } from "../core/router.js";
import { Card, Pill, Resource, Select } from "../ui/parts.js";
import { RunState, useRun } from "../ui/simulation.js";

const HEIGHT = 190, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22;
const colorOf = (index) => `var(--s${1 + (index % 6)})`;

export default function Learn() {
  const lessons = useResource("admin/lessons");
  return html`<${Resource} of=${lessons} empty="This gateway has no lessons." height=${360}>${({ data }) => html`<${Lessons} lessons=${data} />`}<//>`;
}

function Lessons({ lessons }) {
  const { parts: [id] } = route.value;
  const lesson = lessons.find((one) => one.id === (id ?? lessons[0].id));
  return html`<nav class="row" aria-label="Lessons">${lessons.map((one) => html`<a key=${one.id} class="btn" href=${link("learn", [one.id])} aria-current=${one === lesson ? "page" : undefined}>${one.title}</a>`)}</nav>
    ${lesson ? html`<${Lesson} key=${lesson.id} lesson=${lesson} />` : html`<${Card} title="There is no such lesson"><p>The address may be wrong. <a href=${link("learn")}>Open the first lesson</a></p><//>`}`;
}

// The address has the values that differ from those of the start.
function Lesson({ lesson }) {
  const run = useRun();
  const { query } = route.value;
  const values = Object.fromEntries(lesson.controls.map(({ name, value }) => [name, query[name] === undefined ? value : Number(query[name])]));
  const text = JSON.stringify(values);
  useEffect(() => { run.run("admin/lessons/run", { lesson: lesson.id, values: JSON.parse(text) }); }, [text]);
  return html`<${Card} title=${lesson.question}>
      <p class="says"><b>Look.</b> ${lesson.look}</p>
      <div class="lesson"><div class="side-form">${lesson.controls.map((control) => html`<${Control} key=${control.name} control=${control} value=${values[control.name]} />`)}
        <button class="btn" onClick=${() => setQuery(Object.fromEntries(lesson.controls.map(({ name }) => [name, undefined])))}>Use the defaults</button></div>
      <div class="stack"><${RunState} of=${run} />${run.data ? html`<${Result} result=${run.data} />` : null}</div></div><//>
    <${Card} title="In Argosy"><p>${lesson.setting} <span class="s">See <code>docs/${lesson.page}</code>.</span></p><//>`;
}

function Control({ control, value }) {
  const { name, label, unit, minimum, maximum, step, choices } = control;
  const [moved, setMoved] = useState(value);
  useEffect(() => setMoved(value), [value]);
  const save = (text) => setQuery({ [name]: Number(text) === control.value ? undefined : text });
  if (choices.length) return html`<${Select} label=${label} value=${String(value)} options=${choices.map((choice, index) => [String(minimum + index), choice])} onChange=${save} />`;
  return html`<label class="field"><span>${label}: <b>${moved}</b> ${unit}</span>
    <input type="range" min=${minimum} max=${maximum} step=${step} value=${moved} aria-valuetext=${`${moved} ${unit}`}
      onInput=${(event) => setMoved(Number(event.target.value))} onChange=${(event) => save(event.target.value)} /></label>`;
}

const show = (value, unit) => (value === null ? MISSING : unit === "$" ? `$${value.toFixed(2)}` : exact(Math.abs(value) >= 100 ? Math.round(value) : Math.round(value * 100) / 100));

function Result({ result }) {
  const { variants, plots, figures, goals, finding, identity } = result;
  return html`${goals.length ? html`<ul class="goals" aria-label="Goals">${goals.map(({ text, is_met: isMet }) => html`<li key=${text}><${Pill} kind=${isMet ? "ok" : "bad"}>${isMet ? "met" : "missed"}<//> ${text}</li>`)}</ul>` : null}
    <p role="status"><b>Result.</b> ${finding}</p>
    <div class="leg">${variants.map((label, index) => html`<span key=${label}><i style=${{ borderColor: colorOf(index), borderTopStyle: index % 2 ? "dashed" : "solid" }}></i>${label}</span>`)}</div>
    <div class="columns">${plots.map((plot) => html`<${Plot} key=${plot.title} plot=${plot} />`)}</div>
    <div class="rows" role="region" aria-label="Figures" tabindex="0"><table><thead><tr><th>Figure</th>${variants.map((label) => html`<th key=${label} class="n">${label}</th>`)}</tr></thead>
      <tbody>${figures.map(({ label, unit, values }) => html`<tr key=${label}><td>${label}${unit && unit !== "$" ? html` <span class="s">${unit}</span>` : null}</td>${values.map((value, index) => html`<td key=${index} class="n">${show(value, unit)}</td>`)}</tr>`)}</tbody></table></div>
    <p class="s">${identity}</p>`;
}

// Lines over time, or over the values of another quantity, which then have equal distances.
function Plot({ plot }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const { title, unit, x, x_label: xLabel, lines } = plot;
  const top = roundUp(Math.max(...lines.flatMap(({ values }) => values), 0));
  const last = x.length - 1;
  const toX = (index) => LEFT + ((xLabel ? index / last : x[index] / x[last]) * (width - LEFT - RIGHT));
  const toY = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const marks = xLabel ? x.map((value, index) => [index, String(value)]) : [0.25, 0.5, 0.75, 1].map((part) => [Math.round(part * last), duration(x[Math.round(part * last)])]);
  return html`<div ref=${box}><h3>${title} <span class="s">${[unit, xLabel ? `by ${xLabel}` : ""].filter(Boolean).join(", ")}</span></h3>
    ${width ? html`<svg class="pic" role="img" aria-label=${title} width=${width} height=${HEIGHT}>
      ${[0, 0.5, 1].map((part) => html`<g key=${part}><line x1=${LEFT} x2=${width - RIGHT} y1=${toY(part * top)} y2=${toY(part * top)} stroke="var(--line)" /><text x=${LEFT - 6} y=${toY(part * top) + 4} text-anchor="end">${count(part * top)}</text></g>`)}
      ${marks.map(([index, text]) => html`<text key=${index} x=${toX(index)} y=${HEIGHT - 4} text-anchor=${index === last ? "end" : "middle"}>${text}</text>`)}
      ${lines.map(({ label, values }, index) => html`<path key=${label} d=${toPath(values, toX, toY)} fill="none" stroke=${colorOf(index)} stroke-width="2" stroke-dasharray=${index % 2 ? "6 3" : undefined} />`)}</svg>` : null}</div>`;
}

// A point without a value is left out of the line. One between two of them is a dot.
function toPath(values, toX, toY) {
  let path = "", isDown = false;
  values.forEach((value, index) => {
    if (value === null) return;
    path += `${isDown ? "L" : "M"}${toX(index).toFixed(1)} ${toY(value).toFixed(1)}`;
    isDown = true;
  });
  return path;
}

function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * unit >= value) * unit;
}

// What a change does to requests, by a simulation: before a declaration is applied, and for other settings of a pool.
import { html, useState } from "../vendor.js";
import { exact, MISSING, plural, visible } from "../core/format.js";
import { Card, Field, Select } from "./parts.js";
import { RunState, useRun } from "./simulation.js";

const ROUTINGS = ["least-cost", "round-robin", "power-of-two", "latency", "hash"];
const PERIODS = [["3600", "the last hour"], ["86400", "the last day"], ["604800", "the last 7 days"]];

export function Forecast({ body }) {
  const run = useRun();
  const [since, setSince] = useState("86400");
  const simulate = () => run.run("admin/fleet/forecast", { ...body, since_s: Number(since) });
  return html`<div><div class="row"><${Select} label="Requests of" value=${since} options=${PERIODS} onChange=${setSince} />
      <button type="button" class="btn" disabled=${run.isRunning} onClick=${simulate}>Simulate</button></div>
    <${RunState} of=${run} />${run.data ? html`<${Result} forecast=${run.data} />` : null}</div>`;
}

const show = ({ unit }, value) => (unit === "$" ? `$${value.toFixed(2)}` : `${exact(Math.round(value * 10) / 10)} ${unit}`.trim());
const range = (figure, { low, high }) => `${show(figure, low)} to ${show(figure, high)}`;

function Result({ forecast }) {
  return html`<p class="says" role="status">${visible(forecast.sentence)}</p>
    ${forecast.pools.map((pool) => html`<div key=${pool.pool}>
      <p class="s">${visible(pool.pool)}: ${plural(pool.requests, "request")} of the ledger, ${plural(forecast.seeds, "seed")}; ${visible(pool.calibration)}.</p>
      <div class="rows" role="region" aria-label=${`Forecast of ${visible(pool.pool)}`} tabindex="0"><table><thead><tr><th>Figure</th><th class="n">Present</th><th class="n">Then</th><th class="n">Range</th></tr></thead>
        <tbody>${pool.figures.map((figure) => html`<tr key=${figure.name}><td>${figure.name}</td><td class="n">${figure.present ? show(figure, figure.present.mean) : MISSING}</td>
          <td class="n">${show(figure, figure.declared.mean)}</td><td class="n">${range(figure, figure.declared)}</td></tr>`)}</tbody></table></div></div>`)}
    ${forecast.without_effect.length ? html`<p class="s">No request notices ${forecast.without_effect.map(visible).join(", ")}.</p>` : null}`;
}

// Other settings of one pool. An empty field keeps a setting.
export function WhatIf({ pool, close }) {
  const [values, setValues] = useState({ replicas: pool.declared ?? pool.desired - pool.spares });
  const set = (name) => ({ target }) => setValues({ ...values, [name]: target.value });
  const variation = { pool: pool.pool };
  for (const name of ["replicas", "max_seqs"]) if (values[name]) variation[name] = Number(values[name]);
  if (values.routing) variation.routing = values.routing;
  return html`<${Card} title=${`What if: ${visible(pool.pool)}`} actions=${html`<button class="btn" onClick=${close}>Close</button>`}>
    <p class="s">The pool at present and the one below serve the same requests in virtual time. Nothing is changed.</p>
    <div class="row"><${Field} label="Replicas"><input type="number" min="1" max="1000" value=${values.replicas ?? ""} onInput=${set("replicas")} /><//>
      <${Field} label="Sequences of a replica"><input type="number" min="1" max="4096" placeholder="as now" value=${values.max_seqs ?? ""} onInput=${set("max_seqs")} /><//>
      <${Select} label="Routing" value=${values.routing ?? ""} options=${[["", "as now"], ...ROUTINGS.map((name) => [name, name])]} onChange=${(routing) => setValues({ ...values, routing })} /></div>
    <${Forecast} body=${{ variation }} /><//>`;
}

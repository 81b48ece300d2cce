// A new declaration: edited or chosen as a file, planned as `argosy plan` does, and applied with a reason.
import { html, useState } from "../vendor.js";
import { post } from "../core/api.js";
import { visible } from "../core/format.js";
import { Forecast } from "./forecast.js";
import { Card, Field, notify } from "./parts.js";

const KINDS = { "+": "add", "-": "del", "~": "mod" };

// A plan as the command line prints it. The sign says what the colour says.
export const Plan = ({ lines }) => html`<div class="plan mono" role="region" aria-label="Plan" tabindex="0">${lines.map((line, index) => html`<div key=${index} class=${KINDS[line[0]] ?? ""}>${visible(line)}</div>`)}</div>`;

// `start` is the declaration in force when the editor was opened. A plan counts for the text that it was made of.
export function DeclarationEditor({ start, close, reload }) {
  const [text, setText] = useState(start.declaration);
  const [plan, setPlan] = useState(null);
  const [reason, setReason] = useState("");
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const edit = (changed) => { setText(changed); setPlan(null); setError(""); };
  const choose = async ({ target }) => {
    if (target.files[0]) edit(await target.files[0].text());
    target.value = ""; // the same file may be chosen again
  };
  const run = async (action) => {
    setBusy(true);
    setError("");
    try {
      await action();
    } catch (failure) {
      setPlan(null);
      setError(failure.message);
    }
    setBusy(false);
  };
  const makePlan = () => run(async () => setPlan(await post("admin/fleet/plan", { declaration: text })));
  const apply = (event) => {
    event.preventDefault();
    run(async () => {
      const answer = await post("admin/fleet/apply", { declaration: text, after: plan.revision, reason });
      notify(`Revision ${answer.revision} is in force.`);
      reload();
      close();
    });
  };
  return html`<${Card} title="New declaration" note=${`begun with revision ${start.revision}`} actions=${html`<button class="btn" onClick=${close}>Discard</button>`}>
    <${Field} label="Declaration in YAML or JSON" hint="What the machines run, read or trust (engines, images, environment, addresses, files) changes with argosy apply only.">
      <textarea class="mono" rows="20" spellcheck=${false} value=${text} disabled=${isBusy} onInput=${({ target }) => edit(target.value)}></textarea><//>
    <div class="row"><${Field} label="Or a file"><input type="file" accept=".yaml,.yml,.json" onChange=${choose} /><//>
      <button type="button" class="btn primary" disabled=${isBusy} onClick=${makePlan}>Plan</button></div>
    ${error ? html`<p class="failure" role="alert">${visible(error)}</p>` : null}
    ${plan ? html`<form onSubmit=${apply}><h3>Plan</h3>
      ${plan.revision === start.revision ? null : html`<p class="note">Revision ${plan.revision} was applied since you began with revision ${start.revision}. The plan is compared with the newer one, whose changes it may undo.</p>`}
      <${Plan} lines=${plan.lines} />
      ${plan.changes.length ? html`<${Forecast} body=${{ declaration: text }} />` : null}
      ${plan.changes.length ? html`<div class="row"><${Field} label="Why, for the history"><input value=${reason} required onInput=${({ target }) => setReason(target.value)} /><//>
        <button class="btn primary" disabled=${isBusy}>Apply</button></div>` : null}</form>` : null}<//>`;
}

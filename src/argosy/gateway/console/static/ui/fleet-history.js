// The declarations that were applied, each with what it changed, and the way back to an earlier one.
import { html, useState } from "../vendor.js";
import { get, may, post, useResource } from "../core/api.js";
import { time, visible } from "../core/format.js";
import { Plan } from "./declaration-editor.js";
import { FormDialog } from "./form-dialog.js";
import { Action, Card, Resource, notify } from "./parts.js";

const show = (value) => visible(typeof value === "string" ? value : JSON.stringify(value));

// Changes as removed and added lines. The sign says what the colour says.
function Changes({ changes }) {
  if (!changes.length) return html`<p class="empty">Nothing changes.</p>`;
  return html`<ul class="diff">${changes.map(({ path, action, old, new: value, effect, count }) => html`<li key=${path}>
    ${action === "add" ? null : html`<div class="del"><span class="sr">Removed: </span><code>- ${visible(path)}: ${show(old)}</code></div>`}
    ${action === "remove" ? null : html`<div class="add"><span class="sr">Added: </span><code>+ ${visible(path)}: ${show(value)}</code></div>`}
    ${effect === "none" ? null : html`<div class="s">${count ? `${count} ` : ""}${count === 1 ? effect.replace("s ", " ") : effect}</div>`}</li>`)}</ul>`;
}

export function FleetHistory({ revision, reload }) {
  const resource = useResource(`admin/fleet/revisions?limit=20&before=${revision + 1}`);
  const [older, setOlder] = useState({ data: [], has_more: undefined });
  const [planned, setPlanned] = useState(null);
  const plan = async (row) => setPlanned({ row, plan: await get(`admin/fleet/plan?revision=${row.revision}`) });
  const save = async (values) => {
    const answer = await post("admin/fleet/rollback", { revision: planned.row.revision, after: planned.plan.revision, ...values });
    notify(`Revision ${answer.revision} is in force.`);
    reload();
  };
  return html`<${Card} title="History of the declaration" note="newest first, each with what it changed"><${Resource} of=${resource} empty="The fleet was never applied.">${({ data, has_more: hasMore }) => {
    const known = new Set(data.map((row) => row.revision));
    const rows = [...data, ...older.data.filter((row) => !known.has(row.revision))];
    const readMore = async () => {
      const page = await get(`admin/fleet/revisions?limit=20&before=${rows.at(-1).revision}`);
      setOlder({ data: [...older.data, ...page.data], has_more: page.has_more });
    };
    return html`<div>${rows.map((row) => html`<details key=${row.revision} class="revision" open=${row.revision === revision}>
        <summary><b>Revision ${row.revision}</b> ${time(row.applied_at, { date: true })} by ${visible(row.author)}${row.rollback_of ? `, back to revision ${row.rollback_of}` : ""}${row.reason ? `: ${visible(row.reason)}` : ""}</summary>
        ${row.problem ? html`<p class="failure">The changes cannot be shown: ${row.problem}</p>` : html`<${Changes} changes=${row.changes} />`}
        ${row.revision !== revision && !row.problem && may("operator", "gateway") ? html`<${Action} run=${() => plan(row)}>Put it in force again<//>` : null}</details>`)}
      ${older.has_more ?? hasMore ? html`<${Action} run=${readMore}>Older revisions<//>` : null}</div>`;
  }}<//>
    ${planned ? html`<${FormDialog} title=${`Put revision ${planned.row.revision} in force again?`} submit="Apply" save=${save} close=${() => setPlanned(null)}
      fields=${[{ name: "reason", label: "Why, for the history" }]}><h3>Plan</h3><${Plan} lines=${planned.plan.lines} /><//>` : null}<//>`;
}

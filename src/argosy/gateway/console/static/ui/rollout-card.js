// The rollout of a pool: its steps, the evidence of its gate as it grows, what happened, and the commands of operators.
import { html, useState } from "../vendor.js";
import { may, post } from "../core/api.js";
import { age, exact, MISSING, partOf, percent, shortDigests, visible } from "../core/format.js";
import { link } from "../core/router.js";
import { FormDialog } from "./form-dialog.js";
import { Meter } from "./meter.js";
import { Card, Name, Pill, notify } from "./parts.js";
import { Table, timeColumn } from "./table.js";

const STATE_KINDS = { done: "ok", paused: "warn", inconclusive: "warn", rolling_back: "bad", rolled_back: "bad", cleaning: "bad", aborted: "bad" };
const PAUSED = ["paused", "inconclusive"];
const BEFORE_STEPS = ["planned", "starting", "warming", "checking"];
const METRICS = { errors: "Errors", refusals: "Refusals", ttft: "Time to first token", tpot: "Time per token", short_output: "Short outputs", long_output: "Long outputs" };
const words = (text) => text.replaceAll("_", " ");

export const RolloutState = ({ rollout: { rollouts: { current } } }) => html`<${Pill} kind=${STATE_KINDS[current.state] ?? "none"}>${words(current.state)}<//>`;

const COMMANDS = {
  pause: { word: "Pause", hint: "The new version keeps its share, and is still rolled back if it is worse.", done: "The controller will pause the rollout." },
  resume: { word: "Resume", hint: "The rollout goes on, or a version that was rolled back is tried again.", done: "The controller will resume the rollout." },
  promote: { word: "Promote", hint: "The rollout goes to its next step now.", done: "The controller will promote the new version." },
  abort: { word: "Abort", hint: "All users get the old version again within seconds.", done: "All users are sent back to the old version.", kind: "danger" },
};
const FORCE = { name: "force", label: "Evidence", options: [["", "only if it suffices"], ["yes", "go on without it; needs a reason"]], parse: () => true };

// Commands that the state of a rollout allows.
function possible({ is_running: isRunning, can_retry: canRetry, can_roll_back: canRollBack, rollouts: { current: { state } } }) {
  if (!isRunning) return canRetry ? ["resume"] : [];
  if (!canRollBack) return [];
  return [PAUSED.includes(state) ? "resume" : "pause", "promote", "abort"];
}

function Commands({ pool, rollout, reload }) {
  const [name, setName] = useState("");
  if (!may("operator", "gateway")) return null;
  const { word, hint, done } = COMMANDS[name] ?? {};
  const save = async (values) => {
    await post(`admin/fleet/rollout/${name}`, { pool, rollout: rollout.rollouts.current.id, ...values });
    notify(done);
    reload();
  };
  return html`<div class="row commands">${possible(rollout).map((each) => html`<button key=${each} class=${`btn ${COMMANDS[each].kind ?? ""}`} onClick=${() => setName(each)}>${COMMANDS[each].word}</button>`)}
    ${name ? html`<${FormDialog} title=${`${word} the rollout of ${visible(pool)}?`} submit=${word} save=${save} close=${() => setName("")}
      fields=${[{ name: "reason", label: "Why, for the record", hint }, ...(name === "promote" || name === "resume" ? [FORCE] : [])]} />` : null}</div>`;
}

// The steps of the plan with the present one, and the part of the users that has the new version.
function Steps({ rollout: { is_running: isRunning, rollouts: { current: { plan, state, step } } } }) {
  const shares = plan.steps.map(({ share, is_shadow: isShadow }) => (isShadow ? `copies of ${percent(share)}` : `${percent(share)} of the users`));
  const steps = ["start and checks", ...shares, "all users"];
  const isDone = state === "done" || state === "retiring";
  const isOver = !isRunning && !isDone;
  const current = BEFORE_STEPS.includes(state) ? 0 : step + 1;
  const mark = (index) => (isDone || index < current ? "done" : index === current && !isOver ? "now" : "later");
  const marks = { done: "✓ ", now: "▸ ", later: "" };
  return html`<ol class="steps" aria-label="Steps">${steps.map((text, index) => html`
    <li key=${index} class=${mark(index)} aria-current=${mark(index) === "now" ? "step" : undefined}><span aria-hidden="true">${marks[mark(index)]}</span>${text}<span class="sr">${mark(index) === "done" ? ", done" : ""}</span></li>`)}</ol>`;
}

function Versions({ rollout: { shares, status, rollouts: { current: { stable, candidate, plan, step, state } } } }) {
  const shown = state === "step" ? plan.steps[step] : undefined;
  const copies = shown?.is_shadow ? ` and copies of ${percent(shown.share)} of the requests` : "";
  const row = (name, digest, more = "") => {
    const { ready, desired } = status?.versions[digest] ?? { ready: 0, desired: 0 };
    return [html`<dt key=${name}>${name}</dt>`, html`<dd key=${`${name}-facts`}><${Name} value=${digest.slice(0, 12)} /> ${percent(shares[digest] ?? 0)} of the users${more}, ${partOf(ready, desired, "replica")} ready</dd>`];
  };
  return html`<dl class="facts">${row("Old version", stable)}${row("New version", candidate, copies)}</dl>`;
}

function verdictOf(metric, rejected) {
  if (metric.regression === null || metric.regression >= rejected) return ["bad", "worse"];
  return metric.has_passed ? ["ok", "passed"] : ["warn", "needs more"];
}

function Gate({ rollout: { summary, status, rollouts: { current: { plan: { gate } } } } }) {
  if (!status?.metrics.length) return html`<p class="empty">The gate has no measurements yet. They begin when the new version gets its first requests.</p>`;
  // Evidence (e-values) from which the version counts as worse, and each metric as no worse than its margin.
  const rejected = 1 / gate.max_false_rollbacks, needed = 1 / gate.max_false_promotions;
  const bad = (events, requests) => (requests ? `${exact(events)} of ${exact(requests)} (${percent(events / requests)})` : MISSING);
  const row = (metric, cells) => html`<tr key=${metric.metric}><th scope="row">${METRICS[metric.metric] ?? metric.metric}</th>${cells}</tr>`;
  return html`<h3>Gate: ${words(status.result)}</h3>${summary.includes(status.reason) ? null : html`<p>${shortDigests(status.reason)}</p>`}
    <div class="rows" role="region" aria-label="Evidence of the gate" tabindex="0"><table><thead><tr>
      <th scope="col">Metric</th><th scope="col">Result</th><th scope="col" class="n">Bad requests, new version</th><th scope="col" class="n">Old version</th><th scope="col" class="n">Requests needed</th></tr></thead>
      <tbody>${status.metrics.map((metric) => {
        const [kind, word] = verdictOf(metric, rejected);
        return row(metric, html`<td><${Pill} kind=${kind}>${word}<//></td><td class="n">${bad(metric.candidate_events, status.candidate_requests)}</td>
          <td class="n">${bad(metric.stable_events, status.stable_requests)}</td><td class="n">${exact(metric.requests_needed)}</td>`);
      })}</tbody></table></div>
    <details><summary>Evidence as e-values</summary><div class="rows" role="region" aria-label="E-values of the gate" tabindex="0"><table><thead><tr>
      <th scope="col">Metric</th><th scope="col">That it is no worse</th><th scope="col">That it is worse</th></tr></thead>
      <tbody>${status.metrics.map((metric) => {
        const name = METRICS[metric.metric] ?? metric.metric;
        return row(metric, html`<td><${Meter} label=${`${name}: no worse`} value=${metric.equivalence} threshold=${needed} kind="ok" /></td>
          <td><${Meter} label=${`${name}: worse`} value=${metric.regression} threshold=${rejected} kind="bad" /></td>`);
      })}<tr><th scope="row">All together</th><td class="s">every metric has to pass</td>
        <td><${Meter} label="All metrics: worse" value=${status.regression} threshold=${rejected} kind="bad" /></td></tr></tbody></table></div></details>`;
}

// Rollouts that run, for the overview: how far each is, and what it waits for.
export function RunningRollouts({ fleet }) {
  const pools = (fleet?.pools ?? []).filter(({ rollout }) => rollout?.is_running);
  if (!pools.length) return null;
  return html`<${Card} title="Running rollouts"><ul class="att">${pools.map(({ pool, model, rollout }) => html`
    <li key=${pool}><${RolloutState} rollout=${rollout} /><span><b>${visible(pool)}</b>: ${percent(rollout.shares[rollout.rollouts.current.candidate] ?? 0)} of the users. ${shortDigests(rollout.summary)}</span>
      <a href=${link("models", [model])}>Open the rollout</a></li>`)}</ul><//>`;
}

function Notes({ rollout: { commands, status, rollouts: { verdicts } } }) {
  const { check = "pending", check_reason: checkReason = "", error_budget: errorBudget = null, refusals = [] } = status ?? {};
  const notes = [
    check !== "pending" || checkReason ? `Checks: ${check}${checkReason ? `, ${checkReason}` : ""}.` : "",
    errorBudget === null ? "" : `${percent(errorBudget)} of the error budget is left.`,
    ...commands.map(({ kind, by }) => `Waits for a controller: ${kind} by ${by}.`),
    ...refusals.map((refusal) => `Refused: ${refusal}.`),
    ...verdicts.map(({ digest, reason }) => `Rolled back before: version ${digest}, ${reason}.`),
  ].filter(Boolean);
  return notes.length ? html`<ul class="notes">${notes.map((note) => html`<li key=${note}>${shortDigests(note)}</li>`)}</ul>` : null;
}

export function RolloutCard({ pool, rollout, reload }) {
  const { plan, started_at: startedAt, transitions } = rollout.rollouts.current;
  return html`<${Card} title=${`Rollout of ${visible(pool)}`} note=${`${words(plan.strategy)}, started ${age(startedAt)}`} actions=${html`<${RolloutState} rollout=${rollout} />`}>
    <p>${shortDigests(rollout.summary)}</p><${Steps} rollout=${rollout} /><${Versions} rollout=${rollout} />
    <${Commands} pool=${pool} rollout=${rollout} reload=${reload} /><${Notes} rollout=${rollout} />
    ${rollout.is_running || rollout.status?.metrics.length ? html`<${Gate} rollout=${rollout} />` : null}
    <h3>What happened</h3><${Table} label="Transitions" columns=${TRANSITIONS} rows=${transitions.map((each, index) => ({ ...each, index })).reverse()} rowKey=${(row) => row.index} height=${200} csv=${`rollout-${pool}.csv`} /><//>`;
}

const TRANSITIONS = [
  timeColumn("at", "Time"),
  { key: "state", label: "State", value: (row) => words(row.state) },
  { key: "step", label: "Step", isNumber: true, value: (row) => row.step + 1 },
  { key: "reason", label: "Reason", value: (row) => shortDigests(row.reason), cell: (row) => html`<span title=${shortDigests(row.reason)}>${shortDigests(row.reason)}</span>` },
];

// The declared pools: how many replicas each shall have and who decides it, and the replicas that the controller knows.
import { html, useState } from "../vendor.js";
import { get, may, post, query, useResource } from "../core/api.js";
import { age, count, MISSING, plural, significant, time, visible } from "../core/format.js";
import { link } from "../core/router.js";
import { DeclarationEditor } from "./declaration-editor.js";
import { FormDialog } from "./form-dialog.js";
import { FleetHistory } from "./fleet-history.js";
import { Action, Card, Pill, Resource, notify } from "./parts.js";
import { RolloutCard, RolloutState } from "./rollout-card.js";
import { Table, timeColumn } from "./table.js";

const PHASE_KINDS = { ready: "ok", failed: "bad", stopped: "none", out_of_service: "none" };

// All that the controller knows of the pools of a model, or of all pools. The editor stays while the fleet cannot be read.
export function Fleet({ fleet, model }) {
  const [edited, setEdited] = useState(null);
  const isOperator = may("operator", "gateway");
  if (fleet.error?.status === 404) {
    return isOperator ? html`<${Card} title="Declaration"><p class="note">${visible(fleet.error.message)} Until then the models come from the gateway's command line or settings file, and cannot be changed here.</p><//>` : null;
  }
  const edit = async () => setEdited(await get("admin/fleet/declaration"));
  return html`${edited ? html`<${DeclarationEditor} key=${edited.revision} start=${edited} close=${() => setEdited(null)} reload=${fleet.reload} />` : null}
    <${Resource} of=${fleet}>${(data) => {
    const pools = data.pools.filter((pool) => !model || pool.model === model);
    const names = new Set(pools.map(({ pool }) => pool));
    const replicas = data.replicas.filter(({ pool }) => names.has(pool) || !model);
    const detailed = pools.filter(({ rollout }) => model || rollout?.is_running || rollout?.can_retry || pools.length === 1);
    return html`<${Card} title="Declared pools" note=${`fleet ${visible(data.fleet)}, revision ${data.revision}`} actions=${html`${isOperator && !data.is_read_only && !edited ? html`<${Action} run=${edit}>Edit the declaration<//> ` : null}<${Leader} fleet=${data} />`}>
        <${Pools} pools=${pools} isReadOnly=${data.is_read_only} reload=${fleet.reload} /><//>
      ${detailed.map(({ pool, rollout }) => (rollout ? html`<${RolloutCard} key=${`rollout ${pool}`} pool=${pool} rollout=${rollout} reload=${fleet.reload} />` : null))}
      ${detailed.map((pool) => (pool.decision ? html`<${Autoscaler} key=${`autoscaler ${pool.pool}`} pool=${pool} />` : null))}
      <${Card} title="Replicas of the controller" note="also those that no gateway knows yet">
        <${Table} label="Replicas of the controller" columns=${REPLICAS} rows=${replicas} rowKey=${(row) => row.name} height=${280} csv="fleet-replicas.csv" /><//>
      <${FleetHistory} revision=${data.revision} reload=${fleet.reload} />`;
  }}<//>`;
}

const Leader = ({ fleet }) => (fleet.has_leader ? html`<${Pill} kind="ok">controller runs<//>`
  : html`<${Pill} kind="bad">no controller${fleet.lease_age_s === null ? "" : ` for ${Math.round(fleet.lease_age_s)} s`}; run argosy up<//>`);

const decider = ({ declared, autoscaling }) => (autoscaling !== "on" ? "the declaration" : declared === null ? "the autoscaler" : "an operator");
const range = ({ minimum, maximum }) => (maximum === null ? `${minimum}` : `${minimum} to ${maximum}`);

function Pools({ pools, isReadOnly, reload }) {
  const [scaled, setScaled] = useState(null);
  const scale = async (pool, replicas, reason) => {
    await post("admin/fleet/scale", { pool, replicas, ...(reason ? { reason } : {}) });
    notify(replicas === null ? `The autoscaler decides about ${pool} again.` : `${pool} shall have ${plural(replicas, "replica")}.`);
    reload();
  };
  const columns = [
    { key: "pool", label: "Pool", value: (row) => visible(row.pool), cell: (row) => html`<a href=${link("models", [row.model])}>${visible(row.pool)}</a>` },
    { key: "model", label: "Model", value: (row) => visible(row.model) },
    { key: "serving", label: "Serve", isNumber: true, value: (row) => row.serving, cell: (row) => `${row.serving} of ${row.desired}` },
    { key: "starting", label: "Start", isNumber: true, value: (row) => row.starting },
    { key: "existing", label: "Exist", isNumber: true, value: (row) => row.existing },
    { key: "range", label: "Allowed", value: range },
    { key: "spares", label: "Spares", isNumber: true, value: (row) => row.spares },
    { key: "decider", label: "Number set by", value: decider },
    { key: "rollout", label: "Rollout", value: (row) => row.rollout?.rollouts.current.state ?? "", cell: (row) => (row.rollout ? html`<${RolloutState} rollout=${row.rollout} />` : MISSING) },
    { key: "actions", label: "", value: () => "", cell: (row) => (!isReadOnly && may("operator", "gateway") ? html`<button class="btn" onClick=${() => setScaled(row)}>Scale</button>
      ${row.autoscaling === "on" && row.declared !== null ? html`<${Action} run=${() => scale(row.pool, null)}>Automatic<//>` : null}` : null) },
  ];
  return html`<${Table} label="Declared pools" columns=${columns} rows=${pools} rowKey=${(row) => row.pool} height=${240} csv="fleet-pools.csv" />
    ${scaled ? html`<${FormDialog} title=${`Scale ${visible(scaled.pool)}`} submit="Scale" close=${() => setScaled(null)} save=${({ replicas, reason }) => scale(scaled.pool, replicas, reason)}
      fields=${[{ name: "replicas", label: "Replicas that serve", kind: "number", value: scaled.declared ?? scaled.decision?.target ?? scaled.desired - scaled.spares, isRequired: true, parse: Number,
        hint: scaled.autoscaling === "on" ? `${range(scaled)} allowed. It pauses the autoscaler until Automatic.` : "The next apply of the file puts its own number in force." }, { name: "reason", label: "Why, for the history" }]} />` : null}`;
}

const OWNERS = { autoscaler: "the autoscaler", operator: "an operator; the autoscaler is paused", declaration: "the declaration; the autoscaler is advisory" };

function Autoscaler({ pool: { pool, decision } }) {
  const events = useResource(query("admin/events", { pool, kind: "scaling_decision", limit: 50 }), 10000);
  const sums = decision.arithmetic;
  const facts = [
    ["Decided", `${time(decision.at, { date: true })} (${age(decision.at)})`], ["Owner", OWNERS[decision.owner]],
    ["Target", `${plural(decision.target, "replica")}${decision.recommended === decision.target ? "" : `; the rules give ${decision.recommended}`}${decision.spares ? `, ${plural(decision.spares, "spare")}` : ""}`],
    ["Now", `${sums.ready_replicas} ready, ${sums.starting_replicas} starting, ${sums.failing_replicas} failing; ${sums.minimum} to ${sums.maximum} allowed`],
    ["Demand", `${count(sums.demand_tokens_per_s)} tokens/s (${sums.demand_basis})${sums.backlog_tokens ? ` and ${plural(sums.backlog_tokens, "waiting token")}` : ""}`],
    ["One replica serves", sums.capacity_tokens_per_s === null ? "not known yet" : `${count(sums.capacity_tokens_per_s)} tokens/s`],
    ["Needed", `${significant(sums.needed_for_tokens)} for tokens, ${significant(sums.needed_for_kv)} for KV caches, so ${sums.needed}`],
  ];
  return html`<${Card} title=${`Autoscaler of ${visible(pool)}`} note=${decision.action.replace("_", " ")}><p>${decision.reason}</p>
    <dl class="facts">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl>
    <h3>Last decisions</h3><${Resource} of=${events} empty="It has decided nothing yet.">${({ data }) => html`
      <${Table} label="Decisions of the autoscaler" columns=${DECISIONS} rows=${[...data].reverse()} rowKey=${(row) => row.number} height=${200} csv=${`autoscaler-${pool}.csv`} />`}<//><//>`;
}

const DECISIONS = [
  timeColumn("at", "Time"),
  { key: "reason", label: "Decision", value: (row) => row.reason, cell: (row) => html`<span title=${row.reason}>${row.reason}</span>` },
];
const REPLICAS = [
  { key: "name", label: "Replica", value: (row) => row.name, cell: (row) => visible(row.name) },
  { key: "pool", label: "Pool", value: (row) => visible(row.pool) },
  { key: "phase", label: "Phase", value: (row) => row.phase, cell: (row) => html`<${Pill} kind=${PHASE_KINDS[row.phase] ?? "warn"}>${row.phase}<//>` },
  { key: "reason", label: "Reason", value: (row) => row.reason, cell: (row) => html`<span title=${visible(row.reason)}>${visible(row.reason)}</span>` },
  { key: "phase_since", label: "Since", value: (row) => row.phase_since, cell: (row) => (row.phase_since ? age(row.phase_since) : MISSING) },
  { key: "generation", label: "Version", isNumber: true, value: (row) => row.generation },
  { key: "node", label: "Node", value: (row) => visible(row.node) || MISSING }, { key: "zone", label: "Zone", value: (row) => visible(row.zone) || MISSING },
];

// Pools and replicas: how many each pool shall have and who decides it, and what the gateway and the controller know of them.
import { html, useState } from "../vendor.js";
import { get, may, post, query, useResource } from "../core/api.js";
import { age, count, MISSING, plural, significant, time, visible } from "../core/format.js";
import { link } from "../core/router.js";
import { DeclarationEditor } from "./declaration-editor.js";
import { FormDialog } from "./form-dialog.js";
import { FleetHistory } from "./fleet-history.js";
import { WhatIf } from "./forecast.js";
import { Action, Card, Pill, Resource, notify } from "./parts.js";
import { ReplicaTable } from "./replica-table.js";
import { RolloutCard, RolloutState } from "./rollout-card.js";
import { Table, timeColumn } from "./table.js";

// The pools of a model or all pools, with their replicas. A fleet is declared, or the models are from the gateway's settings.
// The editor stays while the fleet cannot be read.
export function Fleet({ fleet, known, replicas, model, reload }) {
  const [edited, setEdited] = useState(null);
  const isOperator = may("operator", "gateway");
  const isUndeclared = fleet.error?.status === 404;
  const data = isUndeclared ? undefined : fleet.data;
  const pools = (data?.pools ?? []).filter((pool) => !model || pool.model === model);
  const names = new Set(pools.map(({ pool }) => pool));
  const detailed = pools.filter(({ rollout }) => model || rollout?.is_running || rollout?.can_retry || pools.length === 1);
  const edit = async () => setEdited(await get("admin/fleet/declaration"));
  return html`${edited ? html`<${DeclarationEditor} key=${edited.revision} start=${edited} close=${() => setEdited(null)} reload=${fleet.reload} />` : null}
    ${fleet.error && !isUndeclared ? html`<${Card} title="Declared fleet"><${Resource} of=${fleet}>${() => null}<//><//>` : null}
    <${Card} title="Pools" note=${data ? `fleet ${visible(data.fleet)}, revision ${data.revision}` : ""} actions=${html`${model ? html`<a href=${link("models")}>All models</a> ` : null}
      ${data && isOperator && !data.is_read_only && !edited ? html`<${Action} run=${edit}>Edit the declaration<//> ` : null}${data ? html`<${Leader} fleet=${data} />` : null}`}>
      <${Resource} of=${known} empty="No model is configured. Add one to the gateway's settings, or apply a fleet." isEmpty=${(all) => !all.data.length && !pools.length}>${(all) => html`
        <${Pools} pools=${joinPools(pools, all.data.filter((pool) => !model || pool.model === model))} isReadOnly=${data?.is_read_only} reload=${fleet.reload} />`}<//><//>
    ${detailed.map(({ pool, rollout }) => (rollout ? html`<${RolloutCard} key=${`rollout ${pool}`} pool=${pool} rollout=${rollout} reload=${fleet.reload} />` : null))}
    ${detailed.map((pool) => (pool.decision ? html`<${Autoscaler} key=${`autoscaler ${pool.pool}`} pool=${pool} />` : null))}
    <${Card} title=${model ? `Replicas of ${visible(model)}` : "Replicas"}><${Resource} of=${replicas}>${(seen) => html`
      <${ReplicaTable} replicas=${seen.data} controlled=${data?.replicas.filter(({ pool }) => names.has(pool) || !model)} height=${420} reload=${reload} csv="replicas.csv" />`}<//><//>
    ${data ? html`<${FleetHistory} revision=${data.revision} reload=${fleet.reload} />` : null}
    ${isUndeclared && isOperator ? html`<${Card} title="Declaration"><p class="note">${visible(fleet.error.message)} Until then the models come from the gateway's command line or settings file, and cannot be changed here.</p><//>` : null}`;
}

// Declared pools with the gateway's view of their models, one for each version, and models that no pool declares.
function joinPools(declared, known) {
  const models = new Set(declared.map(({ model }) => model));
  return [
    ...declared.map((pool) => ({ ...pool, here: known.filter(({ model }) => model === pool.model) })),
    ...known.filter(({ model }) => !models.has(model)).map((pool) => ({ pool: "", model: pool.model, serving: pool.statuses.ready ?? 0, desired: pool.replicas, here: [pool] })),
  ];
}

const Leader = ({ fleet }) => (fleet.has_leader ? html`<${Pill} kind="ok">controller runs<//>${may("operator", "gateway") && !fleet.is_read_only ? html` <a href=${link("models", [], { replica: "controller" })}>Its log</a>` : null}`
  : html`<${Pill} kind="bad">no controller${fleet.lease_age_s === null ? "" : ` for ${Math.round(fleet.lease_age_s)} s`}; run argosy up<//>`);

const decider = ({ declared, autoscaling }) => (autoscaling !== "on" ? "the declaration" : declared === null ? "the autoscaler" : "an operator");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const range = ({ minimum, maximum }) => (maximum === null ? `${minimum}` : `${minimum} to ${maximum}`);

// Replicas that do not serve: those that the controller starts or keeps, or those of each status at the gateway.
function describeOthers({ pool, serving, starting, existing, here }) {
  if (pool) return [starting ? `${starting} starting` : "", existing > serving + starting ? `${existing - serving - starting} out of service` : ""].filter(Boolean).join(", ");
  return Object.entries(here[0].statuses).filter(([name]) => name !== "ready").map(([name, number]) => `${number} ${name}`).join(", ");
}

function Pools({ pools, isReadOnly, reload }) {
  const [scaled, setScaled] = useState(null);
  const [asked, setAsked] = useState(null);
  const scale = async (pool, replicas, reason) => {
    await post("admin/fleet/scale", { pool, replicas, ...(reason ? { reason } : {}) });
    notify(replicas === null ? `The autoscaler decides about ${pool} again.` : `${pool} shall have ${plural(replicas, "replica")}.`);
    reload();
  };
  const isDeclared = pools.some(({ pool }) => pool);
  const columns = [
    ...(isDeclared ? [{ key: "pool", label: "Pool", value: (row) => visible(row.pool) }] : []),
    { key: "model", label: "Model", value: (row) => visible(row.model), cell: (row) => html`<a href=${link("models", [row.model])}>${visible(row.model)}</a>` },
    { key: "serving", label: "Serve", isNumber: true, value: (row) => row.serving, cell: (row) => `${row.serving} of ${row.desired}` },
    { key: "others", label: "Others", value: describeOthers },
    ...(isDeclared ? [
      { key: "range", label: "Allowed", value: (row) => (row.pool ? `${range(row)}${row.spares ? `, ${plural(row.spares, "spare")}` : ""}` : MISSING) },
      { key: "decider", label: "Number set by", value: (row) => (row.pool ? decider(row) : "the settings") },
      { key: "rollout", label: "Rollout", value: (row) => row.rollout?.rollouts.current.state ?? "", cell: (row) => (row.rollout ? html`<${RolloutState} rollout=${row.rollout} />` : MISSING) },
    ] : []),
    { key: "requests", label: "Requests here", isNumber: true, value: (row) => sum(row.here.map((each) => each.active_requests)) },
    { key: "routing", label: "Routing", value: (row) => row.here[0]?.routing ?? "" },
    { key: "resume", label: "Streams resume", value: (row) => !row.here.some((each) => each.is_mixed), cell: (row) => (row.here.some((each) => each.is_mixed) ? html`<${Pill} kind="warn">not on all replicas<//>` : html`<${Pill} kind="ok">on all replicas<//>`) },
    { key: "actions", label: "", value: () => "", cell: (row) => (row.pool && may("operator", "gateway") ? html`${isReadOnly ? null : html`<button class="btn" onClick=${() => setScaled(row)}>Scale</button>`}
      ${!isReadOnly && row.autoscaling === "on" && row.declared !== null ? html`<${Action} run=${() => scale(row.pool, null)}>Automatic<//>` : null}
      <button class="btn" onClick=${() => setAsked(row)}>What if</button>` : null) },
  ];
  return html`<${Table} label="Pools" columns=${columns} rows=${pools} rowKey=${(row) => `${row.pool}\n${row.model}\n${row.here[0]?.version}`} height=${240} csv="pools.csv" />
    ${asked ? html`<${WhatIf} key=${asked.pool} pool=${asked} close=${() => setAsked(null)} />` : null}
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

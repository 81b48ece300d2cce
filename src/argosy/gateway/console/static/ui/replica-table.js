// The table of replicas, with the decisions that an operator takes about them.
import { html } from "../vendor.js";
import { may, post } from "../core/api.js";
import { age, bytes, MISSING, percent, visible } from "../core/format.js";
import { link } from "../core/router.js";
import { Action, Name, Status } from "./parts.js";
import { Table } from "./table.js";

const ACTIONS = {
  drain: { word: "Drain", done: "drains. Its streams move to other replicas." },
  cordon: { word: "Cordon", done: "gets no new requests." },
  undrain: { word: "Undrain", done: "gets requests again." },
};

export function ReplicaActions({ replica, reload }) {
  if (!may("operator", "gateway")) return null;
  const names = replica.state === "active" ? ["drain", "cordon"] : ["undrain"];
  return names.map((name) => html`<${Action} key=${name} done=${`${replica.replica} ${ACTIONS[name].done}`}
    confirm=${name === "drain" ? `Drain ${replica.replica}? Its running streams move to other replicas.` : undefined}
    run=${async () => { await post(`admin/replicas/${name}`, { model: replica.model, replica: replica.replica }); await reload?.(); }}>${ACTIONS[name].word}<//>`);
}

// Replicas of the gateway with the controller's knowledge of them, then those that only the controller knows.
function joinReplicas(replicas, controlled) {
  const byName = new Map(controlled.map((each) => [each.name, each]));
  const seen = new Set(replicas.map(({ replica }) => replica));
  return [
    ...replicas.map((each) => ({ ...each, control: byName.get(each.replica) })),
    ...controlled.filter(({ name }) => !seen.has(name)).map((each) => ({ replica: each.name, model: each.pool, status: each.phase, since: each.phase_since, reason: each.reason, control: each })),
  ];
}

// What keeps a replica from serving: the controller's reason, or the gateway's.
function reasonOf({ replica, status, reason, since, control }) {
  if (control && control.phase !== "ready" && control.phase !== status) return `${control.phase.replaceAll("_", " ")}: ${control.reason}`;
  return reason || (since ? `since ${age(since)}` : "");
}

// `controlled` are the replicas that the controller of a declared fleet knows.
export function ReplicaTable({ replicas, controlled, height, reload, csv }) {
  const columns = [
    { key: "replica", label: "Replica", value: (row) => row.replica, cell: (row) => html`<a href=${link("models", [row.model], { replica: row.replica })}>${visible(row.replica)}</a>` },
    { key: "model", label: controlled ? "Model or pool" : "Model", value: (row) => visible(row.model) },
    { key: "status", label: "State", value: (row) => row.status, cell: (row) => html`<${Status} value=${row.status} />` },
    { key: "reason", label: "Reason", value: reasonOf, cell: (row) => html`<span title=${visible(reasonOf(row))}>${visible(reasonOf(row))}</span>` },
    { key: "running", label: "Running / slots", isNumber: true, value: (row) => row.running, cell: (row) => (row.slots === undefined ? MISSING : `${row.running} / ${row.slots}`) },
    { key: "waiting", label: "Waiting", isNumber: true, value: (row) => row.waiting ?? MISSING },
    { key: "kv", label: "KV in use", isNumber: true, value: (row) => row.kv_usage_ratio, cell: (row) => (row.report_age_s === null ? MISSING : percent(row.kv_usage_ratio)) },
    { key: "cpus", label: "CPUs", isNumber: true, value: (row) => row.usage?.cpus, cell: (row) => (row.usage?.host_cpus ? row.usage.cpus.toFixed(1) : MISSING) },
    { key: "memory", label: "Memory", isNumber: true, value: (row) => row.usage?.memory_bytes, cell: (row) => bytes(row.usage?.memory_bytes) },
    ...(controlled ? [
      { key: "generation", label: "Version", isNumber: true, value: (row) => row.control?.generation ?? MISSING },
      ...(new Set(controlled.map(({ node, zone }) => `${zone} ${node}`)).size < 2 ? [] : [{ key: "node", label: "Node", value: (row) => [row.control?.node, row.control?.zone].filter(Boolean).map(visible).join(", ") || MISSING }]),
    ] : [{ key: "build", label: "Build", value: (row) => row.build, cell: (row) => html`<${Name} value=${row.build} />` }]),
    { key: "actions", label: "", value: () => "", cell: (row) => (row.state ? html`<${ReplicaActions} replica=${row} reload=${reload} />` : null) },
  ];
  return html`<${Table} label="Replicas" columns=${columns} rows=${controlled ? joinReplicas(replicas, controlled) : replicas} rowKey=${(row) => `${row.model}\n${row.replica}`} height=${height} csv=${csv} />`;
}

// The table of replicas, with the decisions that an operator takes about them.
import { html } from "../vendor.js";
import { may, post } from "../core/api.js";
import { age, percent, visible } from "../core/format.js";
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

export function ReplicaTable({ replicas, height, reload, csv }) {
  const columns = [
    { key: "replica", label: "Replica", value: (row) => row.replica, cell: (row) => html`<a href=${link("models", [row.model], { replica: row.replica })}>${visible(row.replica)}</a>` },
    { key: "model", label: "Model", value: (row) => visible(row.model) },
    { key: "status", label: "State", value: (row) => row.status, cell: (row) => html`<${Status} value=${row.status} />` },
    { key: "reason", label: "Reason", value: (row) => row.reason || (row.since ? `since ${age(row.since)}` : "") },
    { key: "running", label: "Running / slots", isNumber: true, value: (row) => row.running, cell: (row) => `${row.running} / ${row.slots}` },
    { key: "waiting", label: "Waiting", isNumber: true, value: (row) => row.waiting },
    { key: "kv", label: "KV in use", isNumber: true, value: (row) => row.kv_usage_ratio, cell: (row) => (row.report_age_s === null ? "–" : percent(row.kv_usage_ratio)) },
    { key: "build", label: "Build", value: (row) => row.build, cell: (row) => html`<${Name} value=${row.build} />` },
    { key: "actions", label: "", value: () => "", cell: (row) => html`<${ReplicaActions} replica=${row} reload=${reload} />` },
  ];
  return html`<${Table} label="Replicas" columns=${columns} rows=${replicas} rowKey=${(row) => `${row.model}\n${row.replica}`} height=${height} csv=${csv} />`;
}

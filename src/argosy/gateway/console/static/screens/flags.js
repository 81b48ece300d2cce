// Flags and caches: which variant of a feature flag requests get, who switched it, what reads it, and how often caches answer.
import { html, useState } from "../vendor.js";
import { call, may, post, useResource } from "../core/api.js";
import { count, duration, percent, visible } from "../core/format.js";
import { FormDialog } from "../ui/form-dialog.js";
import { Action, Card, Name, Pill, Resource, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const REASON = { name: "reason", label: "Reason", hint: "for the audit log" };
const pathOf = ({ id }) => `admin/flags/${encodeURIComponent(id)}`;
const listNames = (text) => text.split(",").map((name) => name.trim()).filter(Boolean);

export default function Flags() {
  const flags = useResource("admin/flags", 5000);
  const [dialog, setDialog] = useState(null);
  const open = (row) => setDialog(html`<${Switch} row=${row} close=${() => setDialog(null)} reload=${flags.reload} />`);
  return html`<${Card} title="Feature flags" note="for all gateways of the store">
      <${Resource} of=${flags} empty="The settings have no feature flags. Add them as feature_flags, and read them in rules.">${({ data }) => html`
        <${Table} label="Feature flags" columns=${listColumns(open, flags.reload)} rows=${data} rowKey=${(row) => row.id} csv="flags.csv" />`}<//><//>
    <${Caches} />${dialog}`;
}

function listColumns(open, reload) {
  const send = (row, body) => async () => { await call("PATCH", pathOf(row), body); reload(); };
  return [
    { key: "id", label: "Flag", value: (row) => row.id, cell: (row) => html`<${Name} value=${row.id} />` },
    { key: "state", label: "State", value: (row) => row.flag.state, cell: (row) => (row.problem ? html`<span title=${visible(row.problem)}><${Pill} kind="bad">as declared<//></span>`
      : html`<${Pill} kind=${row.flag.state === "ENABLED" ? "ok" : "none"}>${row.flag.state.toLowerCase()}<//>`) },
    { key: "default", label: "Others get", value: (row) => row.flag.defaultVariant },
    { key: "rules", label: "Rules", value: (row) => describeRules(row.flag.targeting), cell: (row) => html`<span title=${describeRules(row.flag.targeting)}>${describeRules(row.flag.targeting)}</span>` },
    { key: "read_by", label: "Read by", value: (row) => row.read_by.join(", "), cell: (row) => (row.read_by.length ? visible(row.read_by.join(", ")) : html`<${Pill} kind="warn">nothing<//>`) },
    { key: "changed_by", label: "By", value: (row) => row.changed_by ?? "", cell: (row) => html`<span title=${visible(row.reason)}>${visible(row.changed_by ?? "")}</span>` },
    timeColumn("changed_at", "At"),
    { key: "actions", label: "", value: () => "", cell: (row) => (may("operator", "gateway") ? html`<button type="button" class="btn" onClick=${() => open(row)}>Switch</button>
      <${Action} done=${`${row.id} is changed.`} run=${send(row, { state: row.flag.state === "ENABLED" ? "DISABLED" : "ENABLED" })}>${row.flag.state === "ENABLED" ? "Disable" : "Enable"}<//>
      ${row.changed_at === null ? null : html`<${Action} done=${`${row.id} is as declared.`} confirm=${`Leave ${row.id} to its declaration again?`} run=${async () => { await call("DELETE", pathOf(row)); reload(); }}>Reset<//>`}` : null) },
  ];
}

const describeRules = (targeting) => (Object.keys(targeting).length ? visible(JSON.stringify(targeting)) : "none");

function Switch({ row, close, reload }) {
  const fields = [
    { name: "variant", label: "Variant", options: Object.keys(row.flag.variants).map((name) => [name, `${name} (${JSON.stringify(row.flag.variants[name])})`]), value: row.flag.defaultVariant },
    { name: "tenants", label: "Only for organisations or projects", hint: "by name, as acme or acme/web, with commas", parse: listNames },
    { name: "users", label: "Only for users", hint: "with commas", parse: listNames },
    { name: "percent", label: "Only for a share of users, in percent", kind: "number", parse: Number, hint: "empty: all, or those above" },
    REASON,
  ];
  return html`<${FormDialog} title=${`Switch ${row.id}`} submit="Switch" fields=${fields} close=${close} save=${async (values) => { await call("PATCH", pathOf(row), buildSwitch(row, values)); reload(); notify(`${row.id} is switched.`); }} />`;
}

// Returns the change that gives a variant to all, or to what the form selects. Others get what they have, or what is declared.
function buildSwitch({ flag, declared }, { variant, tenants = [], users = [], percent: share, reason = "" }) {
  const conditions = [
    ["organisation", tenants.filter((name) => !name.includes("/"))], ["project", tenants.filter((name) => name.includes("/"))], ["user", users],
  ].filter(([, names]) => names.length).map(([name, names]) => ({ in: [{ var: name }, names] }));
  if (!conditions.length && share === undefined) return { reason, targeting: {}, defaultVariant: variant };
  const isDefault = flag.defaultVariant === variant;
  const others = isDefault ? declared.defaultVariant : flag.defaultVariant;
  if (others === variant) throw new Error(`All others get ${variant} too. Switch the flag to another variant first.`);
  const part = share === undefined ? [] : [{ fractional: [{ var: "targetingKey" }, [variant, share], [others, 100 - share]] }];
  const targeting = conditions.length ? { if: [{ or: conditions }, variant, ...part] } : part[0];
  return { reason, targeting, ...(isDefault ? { defaultVariant: null } : {}) };
}

const COUNTS = (counts) => Object.entries(counts).sort().map(([name, number]) => `${count(number)} ${name.replaceAll("_", " ")}`).join(", ");
const CACHE_COLUMNS = [
  { key: "rule", label: "Rule", value: (row) => row.rule, cell: (row) => visible(row.rule) },
  { key: "hit_rate", label: "Hits", isNumber: true, value: (row) => row.hit_rate, cell: (row) => percent(row.hit_rate) },
  { key: "saved_s", label: "Saved", isNumber: true, value: (row) => row.saved_s, cell: (row) => duration(row.saved_s) },
  { key: "results", label: "Requests", value: (row) => COUNTS(row.results) },
  { key: "questions", label: "Similar questions", value: (row) => COUNTS(row.questions) },
  { key: "wrong", label: "Wrong in a dry run", value: (row) => (row.wrong_answers ? row.wrong_answers.map(percent).join(" to ") : "") },
];

function Caches() {
  const caches = useResource("admin/cache", 10000);
  const [isPurging, setPurging] = useState(false);
  const fields = [{ name: "project", label: "Project id", hint: "empty: all" }, { name: "model", label: "Model", hint: "empty: all" }];
  const purge = async (values) => {
    const { purged, gateways, unreachable } = await post("admin/cache/purge", values);
    notify(`${count(purged)} answers removed at ${count(gateways)} gateways.${unreachable.length ? ` Repeat it for ${unreachable.join(", ")}.` : ""}`, unreachable.length ? "warn" : "ok");
    caches.reload();
  };
  return html`<${Card} title="Caches of answers" note="by rule, at this gateway since it started" actions=${may("operator", "gateway") ? html`<button type="button" class="btn" onClick=${() => setPurging(true)}>Purge</button>` : null}>
    <${Resource} of=${caches} empty="No cache rule has matched a request.">${({ data }) => html`<${Table} label="Caches" columns=${CACHE_COLUMNS} rows=${data} rowKey=${(row) => row.rule} csv="caches.csv" />`}<//>
    ${isPurging ? html`<${FormDialog} title="Remove kept answers" submit="Purge" fields=${fields} close=${() => setPurging(false)} save=${purge} />` : null}<//>`;
}

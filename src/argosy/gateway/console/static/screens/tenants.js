// Tenants and keys: organisations, projects, users, keys, limits and prices, with everything that the admin API can do.
import { html, useState } from "../vendor.js";
import { call, may, post, query, useResource } from "../core/api.js";
import { count, exact, money, time, visible } from "../core/format.js";
import { route, setQuery } from "../core/router.js";
import { parseClock, zoneName } from "../core/time-zone.js";
import { FormDialog, NewKeyDialog } from "../ui/form-dialog.js";
import { useNames } from "../ui/names.js";
import { Action, Card, Name, Pill, Resource, copyText, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const TABS = ["organisations", "projects", "users", "keys", "limits", "prices"];
const ROLES = ["user", "viewer", "operator", "admin"].map((role) => [role, role]);
const SCOPES = [["organisation", "its organisation"], ["gateway", "the whole gateway"]];
const CONSENTS = [["off", "none, and delete those that there are"], ["automatic", "graded by fixed checks"], ["judged", "graded by fixed checks and a model"]];
const TIERS = ["premium", "standard", "free"].map((tier) => [tier, tier]);
const patch = async (path, body) => (await call("PATCH", path, body)).json();

export default function Tenants() {
  const { query: { tab = "keys", project } } = route.value;
  const current = TABS.includes(tab) ? tab : "keys";
  const names = useNames();
  const resource = useResource(query(`admin/${current}`, { limit: 1000, project: current === "keys" ? project : undefined }));
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const view = VIEWS[current];
  const tools = { names, open: setDialog, close, reload: resource.reload };
  return html`<div class="seg" role="group" aria-label="Kind of record">${TABS.map((name) => html`<button key=${name} aria-pressed=${name === current} onClick=${() => setQuery({ tab: name })}>${name}</button>`)}</div>
    <${Card} title=${current} actions=${view.create && may(view.role, view.scope) ? html`<button class="btn primary" onClick=${() => setDialog(view.create(tools))}>New</button>` : null}>
      <${Resource} of=${resource} empty=${view.empty}>${({ data, has_more: hasMore }) => html`
        <${Table} label=${current} columns=${view.columns(tools)} rows=${data} rowKey=${(row) => row.id} csv=${`${current}.csv`} more=${hasMore ? "Only the first 1000 are shown." : ""} />`}<//><//>
    ${dialog}`;
}

const ended = (row) => (row.archived_at ?? row.disabled_at ? html`<${Pill} kind="none">ended ${time(row.archived_at ?? row.disabled_at, { date: true })}<//>` : html`<${Pill} kind="ok">active<//>`);
const createdColumn = timeColumn("created_at", "Created");
const idColumn = { key: "id", label: "Id", value: (row) => row.id, cell: (row) => html`<${Name} value=${row.id} />` };
const stateColumn = { key: "state", label: "State", value: (row) => row.archived_at ?? row.disabled_at ?? "", cell: ended };
const nameColumn = (key, label) => ({ key, label, value: (row) => row[key], cell: (row) => visible(row[key]) });
const ownerColumn = (key, label, names) => ({ key, label, value: (row) => names(row[key]), cell: (row) => visible(names(row[key])) });
const flagsColumn = { key: "flags", label: "Flags", value: (row) => row.flags.join(", "), cell: (row) => html`${visible(row.flags.join(", "))}${row.unread_flags.length ? html` <span title=${`Nothing reads ${visible(row.unread_flags.join(", "))}`}><${Pill} kind="warn">unread<//></span>` : null}` };
const actionColumn = (cell) => ({ key: "actions", label: "", value: () => "", cell });

function form({ close, reload }, title, fields, path, convert = (values) => values, send = post) {
  return html`<${FormDialog} title=${title} fields=${fields} close=${close} save=${async (values) => { await send(path, convert(values)); reload(); notify("Saved."); }} />`;
}

function keyStatus(row) {
  const now = Date.now() / 1000;
  if (row.revoked_at) return html`<${Pill} kind="none">revoked<//>`;
  if (row.expires_at && row.expires_at <= now) return html`<${Pill} kind="none">expired<//>`;
  return row.expires_at ? html`<${Pill} kind="warn">until ${time(row.expires_at, { date: true })}<//>` : html`<${Pill} kind="ok">valid<//>`;
}

// A key or user with another role is left to those who have that role.
const mayTouch = (row) => may(row.role, row.scope);
const showKey = (tools, answer) => tools.open(html`<${NewKeyDialog} plainKey=${answer.key} close=${tools.close} copy=${() => copyText(answer.key, "The key")} />`);
const list = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);

const VIEWS = {
  organisations: {
    role: "admin", scope: "gateway", empty: "There is no organisation. A gateway without one serves this machine only.",
    create: (tools) => form(tools, "New organisation", [{ name: "name", label: "Name", isRequired: true }], "admin/organisations"),
    columns: (tools) => [nameColumn("name", "Name"), idColumn, stateColumn, createdColumn, actionColumn((row) => (!row.archived_at && may("admin", "gateway") ? html`
      <button class="btn" onClick=${() => tools.open(form(tools, "Rename the organisation", [{ name: "name", label: "Name", value: row.name, isRequired: true }], `admin/organisations/${row.id}`, undefined, patch))}>Rename</button>
      <${Action} kind="danger" confirm=${`Archive ${row.name}? All its keys are rejected, and its users are disabled.`} done="Archived." run=${async () => { await post(`admin/organisations/${row.id}/archive`); tools.reload(); }}>Archive<//>` : null))],
  },
  projects: {
    role: "admin", scope: "organisation", empty: "There is no project. A project is a tenant: keys, limits and fair shares belong to it.",
    create: (tools) => form(tools, "New project", [{ name: "organisation", label: "Organisation id", isRequired: true }, { name: "name", label: "Name", isRequired: true }], "admin/projects"),
    columns: (tools) => [nameColumn("name", "Name"), idColumn, ownerColumn("organisation", "Organisation", tools.names), nameColumn("tier", "Tier"), flagsColumn, { key: "weight", label: "Weight", isNumber: true, value: (row) => row.weight },
      { key: "stored_bytes", label: "Stored", isNumber: true, value: (row) => row.stored_bytes, cell: (row) => html`<span title=${`${exact(row.stored_bytes)} of ${exact(row.max_stored_bytes)} bytes of responses and conversations`}>${count(row.stored_bytes)} of ${count(row.max_stored_bytes)} bytes</span>` }, stateColumn, createdColumn,
      actionColumn((row) => (!row.archived_at && may("admin") ? html`<button class="btn" onClick=${() => tools.open(form(tools, `Change ${row.name}`, [{ name: "name", label: "Name", value: row.name, isRequired: true },
        { name: "quality", label: "Samples of answers for quality", options: CONSENTS, value: row.quality },
        ...(may("admin", "gateway") ? [{ name: "tier", label: "Tier", options: TIERS, value: row.tier }, { name: "weight", label: "Weight among projects of the tier", kind: "number", value: row.weight, parse: Number }] : [])], `admin/projects/${row.id}`, undefined, patch))}>Change</button>
        <${Action} kind="danger" confirm=${`Archive ${row.name}? Its keys are rejected.`} done="Archived." run=${async () => { await post(`admin/projects/${row.id}/archive`); tools.reload(); }}>Archive<//>` : null))],
  },
  users: {
    role: "admin", scope: "organisation", empty: "There is no user. Users are people that an issuer's tokens name.",
    create: (tools) => form(tools, "New user", [{ name: "organisation", label: "Organisation id", isRequired: true }, { name: "email", label: "Email", kind: "email", isRequired: true }, { name: "project", label: "Project id" }, { name: "role", label: "Role", options: ROLES }, { name: "scope", label: "Role holds in", options: SCOPES }], "admin/users"),
    columns: (tools) => [nameColumn("email", "Email"), idColumn, ownerColumn("organisation", "Organisation", tools.names), nameColumn("role", "Role"), nameColumn("scope", "Scope"), stateColumn, createdColumn,
      actionColumn((row) => (!row.disabled_at && may("admin") && mayTouch(row) ? html`<button class="btn" onClick=${() => tools.open(form(tools, `Change ${row.email}`, [{ name: "role", label: "Role", options: ROLES, value: row.role }, { name: "scope", label: "Role holds in", options: SCOPES, value: row.scope }], `admin/users/${row.id}`, undefined, patch))}>Change</button>
        <${Action} kind="danger" confirm=${`Disable ${row.email}? Tokens and keys of the user are rejected.`} done="Disabled." run=${async () => { await post(`admin/users/${row.id}/disable`); tools.reload(); }}>Disable<//>` : null))],
  },
  keys: {
    role: "operator", scope: "organisation", empty: "There is no key yet, so only this machine may send requests.",
    create: (tools) => html`<${FormDialog} title="New key" submit="Create" close=${tools.close} fields=${[{ name: "project", label: "Project id", isRequired: true }, { name: "name", label: "Name", isRequired: true }, { name: "role", label: "Role", options: ROLES }, { name: "scope", label: "Role holds in", options: SCOPES },
      { name: "models", label: "Models, with commas", hint: "empty: all", parse: list }, { name: "expires_at", label: `Expires (${zoneName()})`, kind: "datetime-local", parse: parseClock }]}
      save=${async (values) => { const answer = await post("admin/keys", values); tools.reload(); setTimeout(() => showKey(tools, answer)); }} />`,
    columns: (tools) => [nameColumn("name", "Name"), { ...idColumn, key: "prefix", label: "Key", value: (row) => row.prefix, cell: (row) => html`<${Name} value=${`${row.prefix}…`} />` }, ownerColumn("project", "Project", tools.names), nameColumn("role", "Role"), nameColumn("scope", "Scope"),
      { key: "models", label: "Models", value: (row) => row.models.join(", ") || "all", cell: (row) => visible(row.models.join(", ") || "all") }, flagsColumn, { key: "state", label: "State", value: (row) => row.revoked_at ?? row.expires_at ?? "", cell: keyStatus }, createdColumn,
      actionColumn((row) => (!row.revoked_at && may("operator") && mayTouch(row) ? html`
        <${Action} confirm=${`Rotate ${row.name}? The old key stays valid for a day.`} run=${async () => { const answer = await post(`admin/keys/${row.id}/rotate`); tools.reload(); showKey(tools, answer); }}>Rotate<//>
        <${Action} kind="danger" confirm=${`Revoke ${row.name}? Its requests are rejected at once.`} done="Revoked." run=${async () => { await post(`admin/keys/${row.id}/revoke`); tools.reload(); }}>Revoke<//>` : null))],
  },
  limits: {
    role: "operator", scope: "organisation", empty: "No limit is set.",
    create: (tools) => form(tools, "New limit", [{ name: "owner_kind", label: "For", options: ["project", "key", "user", "organisation"].map((kind) => [kind, kind]) }, { name: "owner", label: "Id", isRequired: true },
      { name: "unit", label: "Of", options: [["requests", "requests"], ["tokens", "tokens"], ["input_tokens", "input tokens"], ["output_tokens", "output tokens"], ["nano_dollars", "cost"], ["concurrency", "concurrent requests"], ["stored_bytes", "stored bytes"]] },
      { name: "amount", label: "At most", hint: "cost in dollars", kind: "number", isRequired: true, parse: Number }, { name: "window", label: "In each", options: [["minute", "minute"], ["second", "second"], ["hour", "hour"], ["day", "day (UTC)"], ["month", "month (UTC)"]] }, { name: "model", label: "Model", hint: "empty: all together" }],
      "admin/limits", ({ window, amount, ...values }) => ({ ...values, amount: Math.round(values.unit === "nano_dollars" ? amount * 1e9 : amount), ...(["concurrency", "stored_bytes"].includes(values.unit) ? {} : { window }) })),
    columns: (tools) => [{ key: "owner", label: "Owner", value: (row) => tools.names(row.owner), cell: (row) => `${row.owner_kind} ${visible(tools.names(row.owner))}` }, nameColumn("unit", "Of"), { key: "amount", label: "At most", isNumber: true, value: (row) => row.amount, cell: (row) => (row.unit === "nano_dollars" ? money(row.amount) : exact(row.amount)) },
      { key: "window", label: "In each", value: (row) => row.window ?? "at a time" }, { key: "model", label: "Model", value: (row) => row.model ?? "all", cell: (row) => visible(row.model ?? "all") },
      actionColumn((row) => (may("operator", row.owner_kind === "organisation" || row.unit === "stored_bytes" ? "gateway" : "organisation") ? html`<${Action} kind="danger" confirm="Delete this limit?" done="Deleted." run=${async () => { await call("DELETE", `admin/limits/${row.id}`); tools.reload(); }}>Delete<//>` : null))],
  },
  prices: {
    role: "admin", scope: "gateway", empty: "No price is set, so requests cost nothing.",
    create: (tools) => form(tools, "New price", [{ name: "model", label: "Model", isRequired: true }, { name: "tier", label: "Tier", options: [["", "all"], ...TIERS] }, ...[["input", "Input"], ["cached_input", "Cached input"], ["output", "Output"]].map(([name, label]) => ({ name, label: `${label}, dollars for a million tokens`, kind: "number", isRequired: true, parse: (text) => Math.round(Number(text) * 1000) }))], "admin/prices"),
    columns: () => [nameColumn("model", "Model"), { key: "tier", label: "Tier", value: (row) => row.tier ?? "all" }, ...[["input", "Input"], ["cached_input", "Cached input"], ["output", "Output"]].map(([key, label]) => ({ key, label: `${label}, per M`, isNumber: true, value: (row) => row[key], cell: (row) => money(row[key] * 1e6) })),
      timeColumn("since", "Since")],
  },
};

// Prompts: their versions, the labels that requests follow, and what a version renders to.
import { html, useState } from "../vendor.js";
import { call, may, post, useResource } from "../core/api.js";
import { route, setQuery } from "../core/router.js";
import { visible } from "../core/format.js";
import { FormDialog } from "../ui/form-dialog.js";
import { useNames } from "../ui/names.js";
import { Action, Card, Field, Name, Pill, Resource, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const isDeclared = ({ id }) => id.startsWith("declared");
const pathOf = ({ id }) => `admin/prompts/${encodeURIComponent(id)}`;
const titleOf = ({ name, version }) => `${visible(name)}@${version}`;

export default function Prompts() {
  const prompts = useResource("admin/prompts?limit=1000", 10000);
  const nameOf = useNames();
  const [dialog, setDialog] = useState(null);
  const tools = { nameOf, reload: prompts.reload, open: setDialog, close: () => setDialog(null) };
  return html`<${Card} title="Versions" note="a version never changes; requests follow a label or a number">
      <${Resource} of=${prompts} empty="There is no prompt. Add one with argosy prompts, or in the settings.">${({ data, has_more: hasMore }) => html`
        <${Table} label="Prompts" columns=${listColumns(tools)} rows=${sortVersions(data)} rowKey=${(row) => row.id} csv="prompts.csv" more=${hasMore ? "Only the first 1000 are shown." : ""} />`}<//><//>
    <${Resource} of=${prompts}>${({ data }) => {
      const row = data.find(({ id }) => id === route.value.query.prompt);
      return row?.content ? html`<${Preview} key=${row.id} row=${row} />` : null;
    }}<//>${dialog}`;
}

const sortVersions = (rows) => [...rows].sort((a, b) => a.name.localeCompare(b.name) || b.version - a.version);

const listColumns = ({ nameOf, reload, open, close }) => [
  { key: "name", label: "Prompt", value: (row) => row.name, cell: (row) => html`<${Name} value=${row.name} />` },
  { key: "version", label: "No.", isNumber: true, value: (row) => row.version },
  { key: "labels", label: "Labels", value: (row) => row.labels.join(", "), cell: (row) => row.labels.map((label) => html`<${Pill} key=${label} kind="ok">${visible(label)}<//> `) },
  { key: "owner", label: "Owner", value: (row) => [row.organisation, row.project].filter(Boolean).map((id) => nameOf(id)).join("/") || "all", cell: (row) => visible([row.organisation, row.project].filter(Boolean).map((id) => nameOf(id)).join("/") || "all") },
  timeColumn("created_at", "Created"),
  { key: "created_by", label: "By", value: (row) => row.created_by, cell: (row) => visible(row.created_by) },
  { key: "actions", label: "", value: () => "", cell: (row) => (row.content ? html`<button type="button" class="btn" onClick=${() => setQuery({ prompt: row.id })}>Preview</button>
    ${mayChange(row) ? html`<button type="button" class="btn" onClick=${() => open(html`<${Label} row=${row} close=${close} reload=${reload} />`)}>Label</button>
      ${row.labels.length ? null : html`<${Action} kind="danger" confirm=${`Delete ${titleOf(row)}? Its number is not used again.`} done="Deleted." run=${async () => { await call("DELETE", pathOf(row)); reload(); }}>Delete<//>`}` : null}` : html`<${Pill} kind="none">deleted<//>`) },
];

const mayChange = (row) => !isDeclared(row) && may("operator", row.organisation ? "organisation" : "gateway");

function Label({ row, close, reload }) {
  const fields = [
    { name: "label", label: "Label", value: "production", isRequired: true, hint: "Another version with this label loses it." },
    { name: "removes", label: "Do", options: [["", "move it to this version"], ["yes", "remove it from this version"]] },
  ];
  const save = async ({ label, removes }) => { await post(`${pathOf(row)}/label`, { label, removes: Boolean(removes) }); reload(); notify(`${titleOf(row)} is changed.`); };
  return html`<${FormDialog} title=${`Label ${titleOf(row)}`} fields=${fields} close=${close} save=${save} />`;
}

// Renders a version with variables that are typed in. Nothing is sent to a model.
function Preview({ row }) {
  const [variables, setVariables] = useState("{}");
  const [rendered, setRendered] = useState(null);
  const [error, setError] = useState("");
  const checked = useResource(isDeclared(row) ? "" : pathOf(row));
  const show = async (event) => {
    event.preventDefault();
    try {
      const reference = isDeclared(row) ? { prompt_id: row.name, prompt_version: row.version } : { prompt_id: row.id };
      setRendered(await post("admin/prompts/render", { ...reference, prompt_variables: parseVariables(variables) }));
      setError("");
    } catch (failure) {
      setRendered(null);
      setError(failure.message);
    }
  };
  const { text, messages, parameters } = row.content;
  const named = checked.data?.variables ?? [];
  return html`<${Card} title=${titleOf(row)} note=${named.length ? `variables: ${named.join(", ")}` : ""} actions=${html`<button type="button" class="btn" onClick=${() => setQuery({ prompt: "" })}>Close</button>`}>
    <pre tabindex="0">${visible(text ?? messages.map((each) => (each.placeholder ? `[${each.placeholder}]` : `${each.role}: ${each.content}`)).join("\n"))}</pre>
    ${Object.keys(parameters).length ? html`<p class="s">Default parameters: <${Name} value=${JSON.stringify(parameters)} /></p>` : null}
    ${(checked.data?.warnings ?? []).map((warning) => html`<p key=${warning} class="note">${visible(warning)}</p>`)}
    <form class="side-form" onSubmit=${show}><${Field} label="Variables as JSON"><textarea rows="3" class="mono" value=${variables} onInput=${(event) => setVariables(event.target.value)}></textarea><//>
      <div class="row"><button class="btn primary">Render</button></div></form>
    ${error ? html`<p class="failure" role="alert">${visible(error)}</p>` : null}
    ${rendered ? html`<pre tabindex="0" aria-label="Rendered">${visible(rendered.text ?? rendered.messages.map(({ role, content }) => `${role}: ${content}`).join("\n"))}</pre>` : null}<//>`;
}

function parseVariables(text) {
  try {
    return JSON.parse(text || "{}");
  } catch (error) {
    throw new Error(`The variables are not valid JSON: ${error.message}`);
  }
}

// Settings and doctor: what is wrong with a remedy, and the settings in force.
import { html, useState } from "../vendor.js";
import { useResource } from "../core/api.js";
import { visible } from "../core/format.js";
import { Card, Field, Name, Pill, Resource } from "../ui/parts.js";
import { Table } from "../ui/table.js";

const KINDS = { ok: ["ok", "OK"], warning: ["warn", "Warning"], problem: ["bad", "Problem"] };
const ORDER = ["problem", "warning", "ok"];

export default function Settings() {
  const checks = useResource("admin/checks", 10000);
  const settings = useResource("admin/settings");
  const [word, setWord] = useState("");
  const [onlyChanged, setOnlyChanged] = useState(false);
  const origin = settings.data?.data.some(({ path, value }) => path === "fleet" && value) ? "the fleet's declaration" : "file or command line";
  const matches = ({ path, is_default: isDefault }) => path.includes(word) && !(onlyChanged && isDefault);
  return html`<${Card} title="Doctor" note="checks of this gateway, again every 10 s" actions=${html`<button class="btn" onClick=${checks.reload}>Check now</button>`}>
      <${Resource} of=${checks} empty="Nothing to check.">${({ data }) => html`<ul class="att">${[...data].sort((a, b) => ORDER.indexOf(a.result) - ORDER.indexOf(b.result)).map((check, index) => html`
        <li key=${index}><${Pill} kind=${KINDS[check.result][0]}>${KINDS[check.result][1]}<//><span><b>${visible(check.subject)}</b> ${check.message}</span></li>`)}</ul>`}<//><//>
    <${Card} title="Settings in force" note="from the defaults, and from what differs from them"><div class="row"><${Field} label="Find"><input value=${word} onInput=${(event) => setWord(event.target.value)} /><//>
      <label class="row s"><input type="checkbox" checked=${onlyChanged} onChange=${(event) => setOnlyChanged(event.target.checked)} /> Only those that differ from the default</label></div>
      <${Resource} of=${settings}>${({ data }) => html`<${Table} label="Settings" columns=${listColumns(origin)} rows=${data.filter(matches)} rowKey=${(row) => row.path} csv="settings.csv" />`}<//><//>`;
}

const listColumns = (origin) => [
  { key: "path", label: "Setting", value: (row) => row.path, cell: (row) => html`<${Name} value=${row.path} />` },
  { key: "value", label: "Value", value: (row) => String(row.value ?? ""), cell: (row) => html`<${Name} value=${row.value === null ? "none" : String(row.value)} />` },
  { key: "source", label: "From", value: (row) => (row.is_default ? "default" : origin) },
];

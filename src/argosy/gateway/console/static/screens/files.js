// Files of the caller's project: what it keeps at the gateway, how long, and how much of its bytes they take.
import { html } from "../vendor.js";
import { call, useResource } from "../core/api.js";
import { bytes, exact, time } from "../core/format.js";
import { Action, Card, Name, Pill, Resource } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const PATH = "console/v1/files";

export default function Files() {
  const files = useResource(PATH, 10000);
  return html`<${Card} title="Files" note="of your project, the latest 10,000">
    <${Resource} of=${files} empty="The project has no files. Clients upload them with the Files API, or argosy files upload.">${({ data }) => html`
      <${Table} label="Files" columns=${listColumns(files.reload)} rows=${data} rowKey=${(row) => row.id} csv="files.csv" />`}<//><//>`;
}

const listColumns = (reload) => [
  { key: "filename", label: "Name", value: (row) => row.filename, cell: (row) => html`<${Name} value=${row.filename} />` },
  { key: "bytes", label: "Size", isNumber: true, value: (row) => row.bytes, cell: (row) => (row.bytes < 2 ** 20 ? `${exact(row.bytes)} B` : bytes(row.bytes)) },
  { key: "purpose", label: "Purpose", value: (row) => row.purpose, cell: (row) => html`<${Pill} kind="none">${row.purpose}<//>` },
  timeColumn("created_at", "At"),
  { key: "expires_at", label: "Expires", isTime: true, value: (row) => row.expires_at, cell: (row) => (row.expires_at ? time(row.expires_at, { date: true }) : "never") },
  { key: "id", label: "Id", value: (row) => row.id },
  { key: "actions", label: "", value: () => "", cell: (row) => html`<${Action} done=${`${row.filename} is deleted.`} confirm=${`Delete ${row.filename} for ever?`}
    run=${async () => { await call("DELETE", `${PATH}/${encodeURIComponent(row.id)}`); reload(); }}>Delete<//>` },
];

// Why prompts miss the prefix cache: tokens by class, and each cause with its remedy and what it would save.
import { html } from "../vendor.js";
import { may, post, query, useResource } from "../core/api.js";
import { age, count, duration, exact, money, percent, time, visible } from "../core/format.js";
import { useNames } from "./names.js";
import { Action, Card, Resource } from "./parts.js";
import { Table } from "./table.js";

const WATCHED_S = 600;
const CLASSES = [["cached_tokens", "cached"], ["unavoidable_tokens", "unavoidable"], ["lost_by_prompt_tokens", "lost by prompts"], ["lost_by_placement_tokens", "lost by placement"]];

export function PrefixDoctor({ model }) {
  const answer = useResource(query("admin/prefix-doctor", { model }), 5000);
  const names = useNames();
  const watch = async () => {
    await post("admin/prefix-doctor", model ? { model, duration_s: WATCHED_S } : { duration_s: WATCHED_S });
    answer.reload();
  };
  const until = Math.max(0, ...(answer.data?.watches ?? []).map((each) => each.until));
  const note = until ? `all prompts are examined until ${time(until)}` : `a sample: ${percent(answer.data?.sample_ratio)} of the time`;
  const actions = may("operator") ? html`<${Action} run=${watch} done="All prompts are examined for 10 minutes. The sums begin again.">Examine all for 10 minutes<//>` : null;
  return html`<${Card} title="Prompts that miss the prefix cache" note=${note} actions=${actions}><${Resource} of=${answer} empty="No prompt was examined yet. The gateway keeps hashes of prompts, no texts.">
    ${({ data }) => data.map((report) => html`<${Report} key=${`${report.project} ${report.model}`} report=${report} names=${names} />`)}<//><//>`;
}

function Report({ report, names }) {
  const { model, project, findings, requests, skipped_requests: skipped, input_tokens: input } = report;
  const shares = CLASSES.map(([key, name]) => `${percent(input ? report[key] / input : undefined)} ${name}`).join(", ");
  const label = `Misses of ${visible(model)}${project ? `, ${visible(names(project))}` : ""}`;
  return html`<h3>${label}</h3><p class="s">${exact(requests)} requests since ${age(report.since)}${skipped ? `, ${exact(skipped)} more were skipped` : ""}. Of ${count(input)} tokens: ${shares}.</p>
    ${findings.length ? html`<${Table} label=${label} columns=${COLUMNS} rows=${findings} rowKey=${(row) => `${row.cause} ${row.segment}`} height=${220} csv="prefix-misses.csv" />
      <ul>${findings.map((row) => html`<li key=${`${row.cause} ${row.segment}`}>${visible(row.advice)}</li>`)}</ul>` : html`<p class="empty">Nothing to mend was found.</p>`}`;
}

const bound = (row, text) => `${row.is_upper_bound ? "≤ " : ""}${text}`;
const COLUMNS = [
  { key: "cause", label: "Cause", value: (row) => row.cause, cell: (row) => row.cause.replaceAll("_", " ") },
  { key: "segment", label: "Where", value: (row) => row.segment, cell: (row) => (row.segment ? `${visible(row.segment)}, token ${exact(row.position_tokens)}` : "–") },
  { key: "requests", label: "Requests", isNumber: true, value: (row) => row.requests, cell: (row) => exact(row.requests) },
  { key: "share", label: "Of input", isNumber: true, value: (row) => row.input_share, cell: (row) => percent(row.input_share) },
  { key: "ttft", label: "TTFT", isNumber: true, value: (row) => row.saved_ttft_s, cell: (row) => bound(row, duration(row.saved_ttft_s)) },
  { key: "tokens", label: "Tokens a day", isNumber: true, value: (row) => row.tokens_per_day, cell: (row) => bound(row, count(row.tokens_per_day)) },
  { key: "cost", label: "Saves a day", isNumber: true, value: (row) => row.nano_dollars_per_day, cell: (row) => bound(row, money(row.nano_dollars_per_day)) },
];

// Quality: sampled answers with their grades, golden sets, their runs, and the comparison of one run with its interval.
import { html } from "../vendor.js";
import { may, useResource } from "../core/api.js";
import { exact, percent, time, visible } from "../core/format.js";
import { link, route } from "../core/router.js";
import { useNames } from "../ui/names.js";
import { Card, Name, Pill, Resource } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const VERDICTS = { worse: ["bad", "Worse"], not_worse: ["ok", "Not worse"], undecided: ["warn", "Undecided"] };
const points = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)} points`;

const Verdict = ({ value }) => (VERDICTS[value] ? html`<${Pill} kind=${VERDICTS[value][0]}>${VERDICTS[value][1]}<//>` : "not compared");

export default function Quality() {
  const sets = useResource("admin/quality/sets?limit=1000", 30000);
  const runs = useResource("admin/quality/runs?limit=1000", 10000);
  const summary = useResource("admin/quality/summary", 30000);
  const samples = useResource("admin/quality/samples?limit=1000", 30000);
  const nameOf = useNames();
  const setOf = new Map((sets.data?.data ?? []).map((each) => [each.id, `${each.name}@${each.version}`]));
  const chosen = (runs.data?.data ?? []).find(({ id }) => id === route.value.parts[0]);
  const nameOfSet = ({ quality_set: id }) => setOf.get(id) ?? id;
  const [kind, sampleId] = route.value.parts;
  return html`${kind === "samples" && sampleId ? html`<${Sample} key=${sampleId} id=${sampleId} row=${(samples.data?.data ?? []).find(({ id }) => id === sampleId)} />` : null}
    ${chosen ? html`<${Comparison} run=${chosen} set=${nameOfSet(chosen)} />` : null}
    <${Card} title="Sampled answers" note="of projects that permit it, in the last 7 days"><${Resource} of=${summary} empty="No answer was sampled: argosy tenants change PROJECT --quality automatic.">
      ${({ data }) => html`<${Table} label="Grades" columns=${SUMMARY_COLUMNS} rows=${data} rowKey=${(row) => `${row.model} ${row.version} ${row.judge}`} height=${200} csv="sample-grades.csv" />`}<//>
      ${(summary.data?.comparisons ?? []).map((each) => html`<p key=${`${each.model} ${each.judge}`}><${Verdict} value=${each.verdict} /> ${versionText(each)}</p>`)}
      ${samples.data?.data?.length ? html`<${Table} label="Samples" columns=${listSampleColumns(nameOf)} rows=${[...samples.data.data].reverse()} rowKey=${(row) => row.id} height=${320} csv="samples.csv" />` : null}<//>
    <${Card} title="Runs" note="the latest first"><${Resource} of=${runs} empty="No golden set was run yet: argosy quality run SET --model MODEL --against OTHER.">
      ${({ data }) => html`<${Table} label="Runs" columns=${listRunColumns(nameOfSet)} rows=${[...data].reverse()} rowKey=${(row) => row.id} height=${320} csv="quality-runs.csv" />`}<//><//>
    <${Card} title="Golden sets" note="requests with assertions about their answers"><${Resource} of=${sets} empty="There are no golden sets: argosy quality import NAME FILE.">
      ${({ data }) => html`<${Table} label="Golden sets" columns=${listSetColumns(nameOf)} rows=${[...data].reverse()} rowKey=${(row) => row.id} height=${320} csv="golden-sets.csv" />`}<//><//>`;
}

// Latest version of a model beside the one before it.
const versionText = ({ model, version, against, judge, warning, pass_ratio: ratio, pass_ratio_before: before }) => `${visible(model)}: ${percent(ratio)} of the samples of version ${visible(version)} pass, and ${percent(before)} of ${visible(against)}, by ${judge ? visible(judge) : "fixed checks"}.${warning ? ` Do not decide by it alone: ${visible(warning)}.` : ""}`;

// Texts of one sampled answer. Reading them is an entry of the audit log.
function Sample({ id, row }) {
  const texts = useResource(`admin/quality/samples/${id}`);
  return html`<${Card} title="Sampled answer" note="without personal data; that you read it is in the audit log" actions=${row ? html`<${Grade} row=${row} />` : null}><${Resource} of=${texts} isEmpty=${() => false}>
    ${({ reason, question, answer }) => html`<dl class="facts"><dt>Response</dt><dd><${Name} value=${id} /></dd>${reason ? html`<dt>Reason</dt><dd>${visible(reason)}</dd>` : null}</dl>
      <h3>Question</h3><pre tabindex="0">${visible(question)}</pre><h3>Answer</h3><pre tabindex="0">${visible(answer)}</pre>`}<//><//>`;
}

const Grade = ({ row }) => html`<${Pill} kind=${row.has_passed ? "ok" : "bad"}>${row.has_passed ? "Passed" : "Failed"}<//>`;

// The difference of both models: what was found, how sure it is, and what the set could not have seen.
function Comparison({ run, set }) {
  const { comparison, discordant, items, total_items: total, passed, judge, judge_warning: warning } = run.result;
  const facts = [
    ["Model", html`<${Name} value=${run.model} />`], ["Golden set", html`<${Name} value=${set} />`],
    ["Mean score", `${run.score.toFixed(3)}, ${exact(passed)} of ${exact(items)} items pass`],
    ["Answered", items < total ? `${exact(items)} of ${exact(total)} items, then the evidence sufficed` : `all ${exact(total)} items`],
    ...(judge ? [["Judge", html`<${Name} value=${judge} />${warning ? ` Do not decide by it alone: ${visible(warning)}.` : ""}`]] : []),
    ...(comparison ? [
      ["Compared with", html`<${Name} value=${run.against} />`],
      ["Difference", `${points(comparison.difference)}, 95 % interval from ${points(comparison.lower)} to ${points(comparison.upper)}`],
      ["Differing items", `${exact(comparison.wins)} better, ${exact(comparison.losses)} worse, of ${exact(comparison.clusters)} independent ones`],
      ["Margin", percent(comparison.margin)],
      ["Detectable loss", comparison.detectable_loss === null ? "none" : percent(comparison.detectable_loss)],
    ] : []),
  ];
  return html`<${Card} title="Comparison" note=${`${time(run.created_at, { date: true })}, by ${visible(run.created_by)}`} actions=${html`<${Verdict} value=${run.verdict} />`}>
    ${comparison ? html`<${Interval} comparison=${comparison} />` : null}
    <dl class="facts">${facts.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value}</dd>`)}</dl>
    ${discordant.length ? html`<${Table} label="Items that differ" columns=${PAIR_COLUMNS} rows=${discordant} rowKey=${([item]) => item} height=${240} csv="discordant-items.csv" />` : null}<//>`;
}

// The interval on a line from a loss of all points to a gain of all, with marks at no difference and at the margin.
function Interval({ comparison: { lower, upper, difference, margin } }) {
  const at = (value) => 50 + 50 * value;
  const label = `Difference ${points(difference)}, interval from ${points(lower)} to ${points(upper)}, margin ${points(-margin)}`;
  return html`<svg class="interval" viewBox="0 0 100 14" preserveAspectRatio="none" role="img" aria-label=${label}>
    <line x1="0" x2="100" y1="7" y2="7" /><line x1="50" x2="50" y1="0" y2="14" /><line class="margin" x1=${at(-margin)} x2=${at(-margin)} y1="0" y2="14" />
    <rect x=${at(lower)} width=${Math.max(0.5, at(upper) - at(lower))} y="4" height="6" /><rect class="mean" x=${at(difference) - 0.3} width="0.6" y="1" height="12" /></svg>`;
}

const SUMMARY_COLUMNS = [
  { key: "model", label: "Model", value: (row) => row.model, cell: (row) => html`<${Name} value=${row.model} />` },
  { key: "version", label: "Version", value: (row) => visible(row.version.slice(0, 19)) },
  { key: "judge", label: "Judge", value: (row) => visible(row.judge) || "fixed checks" },
  { key: "ratio", label: "Passed", isNumber: true, value: (row) => row.passed / row.samples, cell: (row) => percent(row.passed / row.samples) },
  { key: "score", label: "Score", isNumber: true, value: (row) => row.score, cell: (row) => row.score.toFixed(3) },
  { key: "samples", label: "Samples", isNumber: true, value: (row) => row.samples, cell: (row) => exact(row.samples) },
];

const listSampleColumns = (nameOf) => [
  timeColumn("created_at", "Time"),
  { key: "id", label: "Response", value: (row) => row.id, cell: (row) => (may("operator") ? html`<a href=${link("quality", ["samples", row.id])}>${visible(row.id)}</a>` : visible(row.id)) },
  { key: "model", label: "Model", value: (row) => visible(row.model) },
  { key: "project", label: "Project", value: (row) => visible(nameOf(row.project)) },
  { key: "judge", label: "Judge", value: (row) => visible(row.judge) || "fixed checks" },
  { key: "score", label: "Score", isNumber: true, value: (row) => row.score, cell: (row) => row.score.toFixed(2) },
  { key: "grade", label: "Grade", value: (row) => (row.has_passed ? "passed" : "failed"), cell: (row) => html`<${Grade} row=${row} />` },
];

const PAIR_COLUMNS = [
  { key: "item", label: "Item", value: ([item]) => item, cell: ([item]) => html`<${Name} value=${item} />` },
  { key: "model", label: "Model", isNumber: true, value: (row) => row[1] },
  { key: "against", label: "Other", isNumber: true, value: (row) => row[2] },
  { key: "difference", label: "Difference", isNumber: true, value: (row) => row[1] - row[2], cell: (row) => points(row[1] - row[2]) },
];

const listRunColumns = (nameOfSet) => [
  timeColumn("created_at", "Time"),
  { key: "set", label: "Golden set", value: nameOfSet, cell: (row) => html`<a href=${link("quality", [row.id])}>${visible(nameOfSet(row))}</a>` },
  { key: "model", label: "Model", value: (row) => visible(row.model) },
  { key: "against", label: "Against", value: (row) => visible(row.against) },
  { key: "verdict", label: "Verdict", value: (row) => row.verdict, cell: (row) => html`<${Verdict} value=${row.verdict} />` },
  { key: "score", label: "Score", isNumber: true, value: (row) => row.score, cell: (row) => row.score.toFixed(3) },
  { key: "by", label: "By", value: (row) => visible(row.created_by) },
];

const listSetColumns = (nameOf) => [
  { key: "name", label: "Golden set", value: (row) => visible(row.name) },
  { key: "version", label: "Version", isNumber: true, value: (row) => row.version },
  { key: "items", label: "Items", isNumber: true, value: (row) => row.items, cell: (row) => exact(row.items) },
  { key: "judge", label: "Judge", value: (row) => visible(row.judge) },
  { key: "owner", label: "Owner", value: (row) => (row.organisation ? visible(nameOf(row.organisation)) : "all") },
  timeColumn("created_at", "Added"),
  { key: "by", label: "By", value: (row) => visible(row.created_by) },
];

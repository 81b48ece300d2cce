// Alerts: what fires since when, who was notified, silences, and whether notices arrive.
import { html, useState } from "../vendor.js";
import { call, may, post, useResource } from "../core/api.js";
import { age, time, visible } from "../core/format.js";
import { FormDialog } from "../ui/form-dialog.js";
import { Action, Card, Name, Pill, Resource, notify } from "../ui/parts.js";
import { Table, timeColumn } from "../ui/table.js";

const KINDS = { page: ["bad", "Page"], ticket: ["warn", "Ticket"] };
const MAX_EVALUATION_AGE_S = 60;
const HOUR_S = 3600;
const DURATIONS = [["3600", "1 hour"], ["14400", "4 hours"], ["28800", "8 hours"], ["86400", "1 day"], ["604800", "1 week"]];
const mayDecide = () => may("operator", "gateway");

export default function Alerts() {
  const report = useResource("admin/alerts", 5000);
  const [silenced, setSilenced] = useState(null);
  return html`<${Card} title="What fires" note="pages first">
      <${Resource} of=${report} isEmpty=${() => false} empty="">${(data) => html`<${Firing} data=${data} silence=${setSilenced} />`}<//><//>
    <${Card} title="Silences" note="alerts that are shown and not notified"><${Resource} of=${report} empty="No alert is silenced." isEmpty=${(data) => data.silences.length === 0}>
      ${(data) => html`<${Silences} silences=${data.silences} reload=${report.reload} />`}<//><//>
    <${Card} title="Receivers" note="where notices went"><${Resource} of=${report} empty="No notice was sent yet. Receivers are declared as alerting.receivers." isEmpty=${(data) => data.receivers.length === 0}>
      ${(data) => html`<${Receivers} receivers=${data.receivers} reload=${report.reload} />`}<//><//>
    <${Card} title="Ended in the last day"><${Resource} of=${report} empty="No alert ended in the last day." isEmpty=${(data) => endedOf(data).length === 0}>
      ${(data) => html`<${Table} label="Ended alerts" columns=${ENDED} rows=${endedOf(data)} rowKey=${(row) => row.id} height=${280} csv="alerts.csv" />`}<//><//>
    ${silenced ? html`<${SilenceDialog} alert=${silenced} close=${() => setSilenced(null)} reload=${report.reload} />` : null}`;
}

const endedOf = (data) => data.alerts.filter(({ state }) => state === "ended");

function Firing({ data, silence }) {
  const firing = data.alerts.filter(({ state }) => state !== "ended");
  const isBlind = !data.evaluated_at || Date.now() / 1000 - data.evaluated_at > MAX_EVALUATION_AGE_S;
  return html`<div>${isBlind ? html`<p class="failure" role="alert"><b>No process evaluates alerts.</b> Start the controller of the fleet, or the gateway. What is shown is from ${data.evaluated_at ? age(data.evaluated_at) : "never"}.</p>` : null}
    ${firing.length ? html`<ul class="alerts">${firing.map((alert) => html`<${Alert} key=${alert.id} alert=${alert} silence=${silence} />`)}</ul>`
      : html`<p class="empty"><${Pill} kind="ok">Nothing<//> ${data.evaluated_at ? `Checked ${age(data.evaluated_at)}.` : ""}</p>`}</div>`;
}

function Alert({ alert, silence }) {
  const [kind, word] = KINDS[alert.severity] ?? ["none", alert.severity];
  const notified = Object.entries(alert.notified);
  return html`<li><div class="row"><${Pill} kind=${kind}>${word}<//><b>${visible(alert.summary)}</b><span class="sp"></span>
      ${mayDecide() && alert.state === "firing" ? html`<${Action} run=${() => silence(alert)}>Silence<//>` : null}</div>
    <p>${visible(alert.description)}</p>
    <p class="s">Since ${time(alert.started_at, { date: true })}, ${age(alert.started_at)}. ${describeNotices(alert, notified)} Runbook: <${Name} value=${`docs/how-to/runbooks.md#${alert.runbook}`} /></p></li>`;
}

function describeNotices(alert, notified) {
  const sent = notified.length ? `Notified: ${notified.map(([name, at]) => `${visible(name)} at ${time(at)}`).join(", ")}.` : "No notice was sent.";
  if (alert.state === "silenced") return `Silenced by ${alert.silence}. ${sent}`;
  return alert.state === "explained" ? `Explained by ${visible(alert.explained_by)}, so it is not notified. ${sent}` : sent;
}

const matchersOf = (silence) => Object.entries(silence.matchers).map(([name, pattern]) => `${name}=${pattern}`).join(" ");

function Silences({ silences, reload }) {
  const end = async (silence) => {
    await call("DELETE", `admin/alerts/silences/${encodeURIComponent(silence.id)}`);
    reload();
  };
  return html`<ul class="alerts">${silences.map((silence) => html`<li key=${silence.id}><div class="row"><b>${visible(matchersOf(silence))}</b><span class="sp"></span>
      ${mayDecide() ? html`<${Action} run=${() => end(silence)} done="The silence is over.">End<//>` : null}</div>
    <p class="s">Until ${time(silence.ends_at, { date: true })}, by ${visible(silence.author)}: ${visible(silence.reason)}</p></li>`)}</ul>`;
}

function Receivers({ receivers, reload }) {
  const test = async (name) => {
    await post("admin/alerts/tests", { receiver: name });
    notify(`A test notice to ${name} was ordered. Its result is here within 20 seconds.`);
    reload();
  };
  return html`<ul class="alerts">${receivers.map(({ name, delivered_at: at, failing_since: since, error }) => html`<li key=${name}><div class="row">
      <${Pill} kind=${since ? "bad" : "ok"}>${since ? "Fails" : "Delivers"}<//><b>${visible(name)}</b><span class="sp"></span>
      ${mayDecide() && canTest(name) ? html`<${Action} run=${() => test(name)}>Send a test<//>` : null}</div>
    <p class="s">${at ? `Last delivery ${age(at)}.` : "No notice arrived yet."} ${since ? `Since ${time(since, { date: true })}: ${visible(error)}` : ""}</p></li>`)}</ul>`;
}

// The watchdog, and Alertmanagers, which have addresses as names, are no receivers of notices.
const canTest = (name) => name !== "watchdog" && !name.includes(":");

function SilenceDialog({ alert, close, reload }) {
  const save = async ({ duration, reason, ...patterns }) => {
    const matchers = Object.fromEntries(Object.entries(patterns).map(([name, pattern]) => [name.replace(/^label_/, ""), pattern]));
    await post("admin/alerts/silences", { matchers, duration_s: Number(duration ?? HOUR_S), reason });
    notify("The alert is silenced.");
    reload();
  };
  const labels = Object.entries(alert.labels).map(([name, value]) => ({ name: `label_${name}`, label: name, value, hint: name === "alertname" ? "Empty fields match anything; * at the end matches any text." : undefined }));
  return html`<${FormDialog} title="Silence alerts" submit="Silence" save=${save} close=${close}
    fields=${[...labels, { name: "duration", label: "For", options: DURATIONS, value: "3600" }, { name: "reason", label: "Why, for others", isRequired: true }]} />`;
}

const ENDED = [
  { key: "severity", label: "Kind", value: (row) => row.severity },
  { key: "name", label: "Alert", value: (row) => row.name },
  timeColumn("started_at", "From"),
  timeColumn("ended_at", "To"),
  { key: "summary", label: "Summary", value: (row) => row.summary, cell: (row) => html`<span title=${row.description}>${visible(row.summary)}</span>` },
];

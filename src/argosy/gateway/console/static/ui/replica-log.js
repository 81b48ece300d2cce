// The end of a replica's log and the reasons of its last ends, as its controller recorded them. They outlive the process.
import { html, useEffect, useRef, useState } from "../vendor.js";
import { may, query, useResource } from "../core/api.js";
import { age, time, visible } from "../core/format.js";
import { Card, Pill, Resource, Select, save } from "./parts.js";

const LIVE_INTERVAL_MS = 2000;
const STALE_S = 20;
const LEVELS = [["debug", "all"], ["info", "info and above"], ["warning", "warnings and errors"], ["error", "errors"]];
const NOT_RECORDED = { controller: "Only a controller of argosy up has a log file. Where systemd or Kubernetes runs it, see journalctl or kubectl logs." };

export function ReplicaLog({ name }) {
  const [startedAt, setStartedAt] = useState("");
  const [level, setLevel] = useState("debug");
  const mayRead = may("operator", "gateway");
  const log = useResource(mayRead ? query("admin/replicas/log", { replica: name, started_at: startedAt, level, format: "text" }) : null, LIVE_INTERVAL_MS);
  if (!mayRead) return html`<${Card} title="Log"><p class="empty">A log may contain what users sent. It needs the role operator of the gateway.</p><//>`;
  if (log.error?.status === 404 && !startedAt) return html`<${Card} title="Log"><p class="empty">${log.error.message}</p><//>`;
  return html`<${Card} title="Log" note="the last lines"><${Resource} of=${log} height=${200} empty=${NOT_RECORDED[name] ?? "The controller has not recorded a log of this replica. It does so when the replica runs or ends."} isEmpty=${({ run }) => !run}>
    ${({ run, runs, lines }) => html`<div><${LastEnd} runs=${runs} />
      <div class="row">${runs.length > 1 ? html`<${Select} label="Run" value=${startedAt} onChange=${setStartedAt} options=${[["", "the latest"], ...runs.map((each) => [String(each.started_at), describeRun(each)])]} />` : null}
        <${Select} label="Lines" value=${level} onChange=${setLevel} options=${LEVELS} />
        <span class="s">${run.exited_at === null ? html`<${RunState} run=${run} />` : `ended ${time(run.exited_at, { date: true })}`}</span>
        <span class="sp"></span>
        <button class="link" onClick=${() => save(`${name}.log`, new Blob([lines.join("\n")], { type: "text/plain" }))}>Save as text</button></div>
      ${run.error ? html`<p class="note" role="status">The log could not be read: ${visible(run.error)}</p>` : null}
      <${Lines} lines=${lines} run=${run.started_at} empty=${level === "debug" ? "The log is empty." : "The log has no such lines."} /></div>`}<//><//>`;
}

// A controller that is away reads no log.
function RunState({ run }) {
  const isStale = Date.now() / 1000 - run.read_at > STALE_S;
  return html`<span><${Pill} kind=${isStale ? "warn" : "ok"}>${isStale ? "not updated" : "running"}<//> read ${age(run.read_at)}</span>`;
}

// Why the replica last ended, which stays visible while it runs again.
function LastEnd({ runs }) {
  const ended = runs.find((run) => run.exited_at !== null);
  if (!ended) return null;
  return html`<p><${Pill} kind=${ended.exit_status === 0 ? "none" : "bad"}>Last end<//>${" "}
    ${time(ended.exited_at, { date: true })} (${age(ended.exited_at)}): ${visible(ended.reason || "no reason is known")}${ended.exit_status === null ? "" : `, exit status ${ended.exit_status}`}</p>`;
}

const describeRun = (run) => `${run.attempt}: ${time(run.started_at, { date: true })}${run.exited_at === null ? ", running" : ` to ${time(run.exited_at)}`}`;

// Lines as plain text. The view follows the end unless the reader has scrolled up.
function Lines({ lines, run, empty }) {
  const box = useRef(null);
  const isAtEnd = useRef(true);
  useEffect(() => { isAtEnd.current = true; }, [run]);
  useEffect(() => { if (isAtEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight; }, [lines]);
  const onScroll = () => { const { scrollTop, scrollHeight, clientHeight } = box.current; isAtEnd.current = scrollHeight - scrollTop - clientHeight < 24; };
  if (!lines.length) return html`<p class="empty">${empty}</p>`;
  return html`<pre class="log" ref=${box} onScroll=${onScroll} tabindex="0" role="region" aria-label="Log">${lines.map(showLine).join("\n")}</pre>`;
}

// Tabs are kept; other characters that cannot be seen are shown by their codes.
const showLine = (line) => line.split("\t").map(visible).join("\t");

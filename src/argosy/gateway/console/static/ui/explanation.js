// One request: a sentence that says where its time went, the waterfall, the candidates, limits and price.
import { html } from "../vendor.js";
import { count, duration, exact, money, percent, plural, time, visible } from "../core/format.js";
import { Candidates } from "./candidates.js";
import { Card, Name, Status, copyText } from "./parts.js";

const seconds = (ms) => (ms === null || ms === undefined ? undefined : ms / 1000);

export function Explanation({ explanation }) {
  const bars = buildBars(explanation);
  const total = seconds(explanation.ms?.ended) ?? Math.max(0, ...bars.map(({ end }) => end));
  return html`
    <${Card} title=${explanation.status === "completed" ? "Why it took as long as it did" : `How it ended: ${explanation.status}`} actions=${html`<${Status} value=${explanation.status} />`}>
      <p>${describe(explanation, bars, total)}</p><${Facts} explanation=${explanation} /><//>
    ${bars.length ? html`<${Card} title="Where the time went" note=${`${duration(total)} in all, by the clock of gateway ${explanation.gateway ?? ""}`}
      actions=${html`<button class="btn" onClick=${() => copyText(JSON.stringify(explanation, null, 2), "The explanation")}>Copy as JSON</button>`}>
      <${Waterfall} bars=${bars} total=${total} first=${seconds(explanation.ms.first_token)} /><//>`
    : html`<${Card} title="Where the time went"><p class="empty">Only the ledger still knows this request. Its trace was kept by a gateway that is gone, or has expired.</p><//>`}
    <div class="columns"><${AttemptCandidates} attempts=${explanation.attempts ?? []} /><${Price} explanation=${explanation} /></div>
    ${explanation.limits?.length ? html`<${Limits} limits=${explanation.limits} />` : null}`;
}

function buildBars({ ms, attempts = [], queue, tokens, pauses = [] }) {
  if (!ms) return [];
  const bars = [];
  const add = (name, kind, start, end, why = "", isInner = false) => {
    if (start === undefined || end === undefined || end < start) return;
    bars.push({ name, kind, start, end, why, isInner });
  };
  add("Read the request", "gateway", 0, seconds(ms.read), "headers, body, key");
  add("Limits and quotas", "gateway", seconds(ms.read), seconds(ms.admitted), "");
  if (ms.queued !== null && ms.queued !== undefined) {
    const left = seconds(attempts[0]?.chosen_ms ?? ms.ended);
    add("Queue", "queue", seconds(ms.queued), left, queue ? `${plural(queue.ahead, "request")} ${queue.ahead === 1 ? "was" : "were"} ahead` : "");
  }
  attempts.forEach((attempt, index) => {
    const start = seconds(attempt.chosen_ms), end = seconds(attempt.ended_ms ?? ms.ended), first = seconds(attempt.first_token_ms);
    const hasFailed = attempt.outcome !== "success" && attempt.outcome !== null;
    const name = `${attempt.hedge ? "Hedge" : "Attempt"} ${index + 1}: ${visible(attempt.replica)}`;
    add(name, hasFailed ? "failed" : "attempt", start, end, [attempt.outcome, attempt.reason].filter(Boolean).join(": ") || "running");
    if (first === undefined) return;
    add("connect and send", "gateway", start, seconds(attempt.sent_ms), "", true);
    add(`prefill ${plural(tokens?.prompt, "token")}`, "prefill", seconds(attempt.sent_ms) ?? start, first, `${count(tokens?.cached)} cached, with the wait for a batch slot`, true);
    add(`decode ${plural(tokens?.output, "token")}`, "decode", first, end, rate(tokens?.output, end - first), true);
  });
  for (const pause of pauses) add("Paused for other requests", "queue", seconds(pause.paused_ms), seconds(pause.resumed_ms ?? ms.ended), "a lower tier gives way");
  if (ms.last_token !== null) add("Finish", "gateway", seconds(ms.last_token), seconds(ms.ended), "ledger and last bytes");
  return bars;
}

const rate = (tokens, span) => (tokens > 1 && span > 0 ? `${count((tokens - 1) / span)} tokens per s` : "");

// The sentence names what took the most time, and what would have been without waiting and failures.
function describe(explanation, bars, total) {
  if (explanation.error) return `It was refused or failed with ${explanation.error}${explanation.limits?.some(({ fits }) => !fits) ? ", because a limit was reached (see below)" : ""}.`;
  if (!bars.length || !total) return "There is no trace with times. The ledger has the tokens and the cost.";
  const span = (kind) => bars.filter((bar) => bar.kind === kind).reduce((sum, bar) => sum + bar.end - bar.start, 0);
  const spans = [
    ["waiting in the queue", span("queue")], ["on attempts that failed", span("failed")], ["on the prefill of the prompt", span("prefill")],
    ["on decoding the output", span("decode")], ["in the gateway", span("gateway")],
  ].filter(([, value]) => value / total >= 0.02).sort((a, b) => b[1] - a[1]);
  const avoidable = span("queue") + span("failed");
  const shares = spans.slice(0, 3).map(([what, value]) => `${percent(value / total)} ${what}`);
  const sentence = `It spent ${shares.length > 1 ? `${shares.slice(0, -1).join(", ")} and ${shares.at(-1)}` : shares[0] ?? "all of its time in the replica"}.`;
  const first = seconds(explanation.ms.first_token);
  if (first === undefined) return sentence;
  const without = avoidable / total >= 0.02 ? ` Without waiting and failures, the first token would have come after about ${duration(Math.max(0, first - avoidable))}.` : "";
  return `${sentence} The first token came after ${duration(first)}.${without}`;
}

function describeFinding({ rule, side, detector, action, count: found }) {
  return detector ? `${rule ? `${visible(rule)}: ` : ""}${count(found)} × ${visible(detector)} (${side}, ${action})` : `${visible(rule)}: nothing found`;
}

function Facts({ explanation }) {
  const { caller = {} } = explanation;
  const facts = [
    ["Request", html`<${Name} value=${explanation.request_id || explanation.id} />`], ["Response", html`<${Name} value=${explanation.id} />`],
    ["Started", time(explanation.started_at, { date: true })], ["Model", `${visible(explanation.model)}${explanation.asked && explanation.asked !== explanation.model ? `, asked for ${visible(explanation.asked)}` : ""}`],
    ["Route", explanation.route ? `${visible(explanation.route)}: ${explanation.route_reason ?? ""}` : null],
    ["Cache", (explanation.cache ?? []).map(describeCache).join("; ")],
    ["Tenant", [caller.organisation, caller.project].filter(Boolean).map(visible).join(" / ") || "this machine"], ["Key", caller.key], ["Tier", caller.tier],
    ["Content", explanation.content?.map(describeFinding).join("; ")],
    ["Left out", explanation.truncation ? `${explanation.truncation.dropped.join(", ")} of ${plural(explanation.truncation.messages, "message")}, by ${explanation.truncation.policy}` : null],
    ["Ended by", Object.values(explanation.finish_reasons ?? {}).join(", ")], ["Path", explanation.path],
  ].filter(([, value]) => value);
  return html`<dl class="facts">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl>`;
}

function describeCache({ rule, result, similarity, age_s: age, saved_s: saved, saved_nano_dollars: price }) {
  const facts = [similarity === undefined ? "" : `similarity ${similarity.toFixed(3)}`, age === undefined ? "" : `${duration(age)} old`,
    saved === undefined ? "" : `saved ${duration(saved)}`, price ? `and ${money(price)}` : ""].filter(Boolean);
  return `${visible(rule)}: ${[result, ...facts].join(", ")}`;
}

function Waterfall({ bars, total, first }) {
  const at = (value) => `${((value / total) * 100).toFixed(2)}%`;
  return html`<div class="fall" role="table" aria-label="Waterfall">${bars.map(({ name, kind, start, end, why, isInner }, index) => html`
    <div key=${`n${index}`} class=${isInner ? "in" : ""}>${name}</div>
    <div key=${`t${index}`} class="track"><i class=${kind} style=${{ left: at(start), width: at(Math.min(end, total) - start), top: "7px" }}></i>${first !== undefined ? html`<u style=${{ left: at(first) }}></u>` : null}</div>
    <div key=${`d${index}`} class="n">${duration(end - start)}</div><div key=${`w${index}`} class="why s">${why}</div>`)}</div>
    ${first !== undefined ? html`<p class="s">The dashed line is the first token, ${duration(first)} after the request arrived.</p>` : null}`;
}

function AttemptCandidates({ attempts }) {
  const shown = attempts.filter(({ candidates }) => candidates?.length);
  return html`<${Card} title="Candidates" note="predicted seconds; the lowest cost wins">${shown.length ? shown.map((attempt, index) => html`
    <${Candidates} key=${index} label=${`Candidates of attempt ${index + 1}`} candidates=${attempt.candidates} chosen=${attempt.replica} />`)
    : html`<p class="empty">No replica was chosen.</p>`}<//>`;
}

function Price({ explanation }) {
  const { ledger, tokens } = explanation;
  if (!ledger) return html`<${Card} title="Price"><p class="empty">It was not charged. ${tokens?.output ? "The gateway has no ledger." : ""}</p><//>`;
  const fresh = ledger.input_tokens - ledger.cached_tokens;
  const lines = [["Input, fresh", fresh, ledger.rates?.input], ["Input, cached", ledger.cached_tokens, ledger.rates?.cached_input], ["Output", ledger.output_tokens, ledger.rates?.output]];
  return html`<${Card} title="Price" note=${ledger.rates ? "nano-dollars for each token" : "the trace with the rates is gone"}><div class="rows" tabindex="0" role="region" aria-label="Price"><table>
    <thead><tr><th scope="col">Part</th><th scope="col" class="n">Tokens</th><th scope="col" class="n">Rate</th><th scope="col" class="n">Amount</th></tr></thead>
    <tbody>${lines.map(([name, amount, price]) => html`<tr key=${name}><td>${name}</td><td class="n">${exact(amount)}</td><td class="n">${exact(price)}</td><td class="n">${price === undefined ? "–" : money(amount * price)}</td></tr>`)}
      <tr><td><b>Total</b></td><td></td><td></td><td class="n"><b>${money(ledger.nano_dollars)}</b></td></tr></tbody></table></div><//>`;
}

function Limits({ limits }) {
  return html`<${Card} title="Limits that were checked"><div class="rows" tabindex="0" role="region" aria-label="Limits"><table><thead><tr><th scope="col">Owner</th><th scope="col">Unit</th><th scope="col">Window</th><th scope="col" class="n">Used</th><th scope="col" class="n">Asked</th><th scope="col" class="n">Limit</th><th scope="col">Result</th></tr></thead>
    <tbody>${limits.map((limit, index) => html`<tr key=${index}><td>${visible(limit.owner)}</td><td>${limit.unit}</td><td>${limit.window}</td><td class="n">${exact(limit.used)}</td><td class="n">${exact(limit.asked)}</td><td class="n">${exact(limit.limit)}</td>
      <td>${limit.fits ? "fits" : limit.wait_s === null ? "never fits" : `fits in ${duration(limit.wait_s)}`}</td></tr>`)}</tbody></table></div><//>`;
}

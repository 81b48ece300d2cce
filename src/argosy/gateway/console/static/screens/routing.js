// Routing: which replica a request would get and why, and the prefixes that are cached.
import { html, useState } from "../vendor.js";
import { may, post, query, useResource } from "../core/api.js";
import { duration, plural, visible } from "../core/format.js";
import { route, setQuery } from "../core/router.js";
import { CostBars, Candidates } from "../ui/candidates.js";
import { Card, Field, Pill, Resource, Select, copyText } from "../ui/parts.js";
import { PrefixDoctor } from "../ui/prefix-doctor.js";
import { PrefixMap } from "../ui/prefix-map.js";
import { Table } from "../ui/table.js";

const KINDS = [["chat", "Chat"], ["completion", "Completion"], ["body", "Body as JSON"]];
const TIERS = [["", "of the sender"], ["premium", "premium"], ["standard", "standard"], ["free", "free"]];
const EXAMPLE = "Explain what a KV cache is in two sentences.";

export default function Routing() {
  const pools = useResource("admin/pools", 10000);
  return html`<${Resource} of=${pools} empty="No model is served. Add one to the gateway's settings, or apply a fleet.">${({ data }) => {
    const models = [...new Set(data.map(({ model }) => model))];
    const model = models.includes(route.value.query.model) ? route.value.query.model : models[0];
    return html`<${Preview} models=${models} model=${model} /><${Prefixes} key=${model} model=${model} /><${PrefixDoctor} model=${model} />`;
  }}<//>`;
}

function Preview({ models, model }) {
  const { query: { kind = "chat", user = "", session = "", tier = "", project = "", key = "" } } = route.value;
  const [text, setText] = useState("");
  const [system, setSystem] = useState("");
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const set = (name) => (event) => setQuery({ [name]: event.target.value.trim() });
  const ask = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      const request = buildRequest(kind, model, text || EXAMPLE, { system, user, session });
      setAnswer(await post("admin/routing/preview", { request, tier: tier || null, project: project || null, key: key || null }));
    } catch (failure) {
      setAnswer(null);
      setError(failure.message);
    }
    setBusy(false);
  };
  return html`<${Card} title="Which replica would get it?" note="nothing is sent, counted or billed"><form class="side-form" onSubmit=${ask}>
    <div class="row"><${Select} label="Model" value=${model} options=${models.map((name) => [name, visible(name)])} onChange=${(name) => setQuery({ model: name, prefix: "" })} />
      <${Select} label="Kind" value=${kind} options=${KINDS} onChange=${(value) => setQuery({ kind: value })} />
      <${Select} label="Tier" value=${tier} options=${TIERS} onChange=${(value) => setQuery({ tier: value })} />
      <${Field} label="User"><input value=${user} disabled=${kind === "body"} onChange=${set("user")} /><//><${Field} label="Session"><input value=${session} disabled=${kind === "body"} onChange=${set("session")} /><//>
      ${may("operator", "gateway") ? html`<${Field} label="As project (id)"><input value=${project} placeholder="yours" onChange=${set("project")} /><//><${Field} label="As key (id)"><input value=${key} placeholder="yours" onChange=${set("key")} /><//>` : null}</div>
    ${kind === "chat" ? html`<${Field} label="System prompt"><textarea rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea><//>` : null}
    <${Field} label=${kind === "body" ? "Body of the request" : "Prompt"} hint="A prompt has to be spelled as its client sends it, or its cached blocks are not found.">
      <textarea name="prompt" rows="4" class=${kind === "body" ? "mono" : ""} placeholder=${kind === "body" ? '{"messages": [{"role": "user", "content": "Hello"}]}' : EXAMPLE} value=${text} onInput=${(event) => setText(event.target.value)}></textarea><//>
    <div class="row"><button class="btn primary" disabled=${isBusy}>Preview</button></div></form>
    ${error ? html`<p class="failure tail" role="alert">${error}</p>` : null}<//>
    <div aria-live="polite">${answer ? html`<${Answer} answer=${answer} />` : null}</div>`;
}

function buildRequest(kind, model, text, { system, user, session }) {
  if (kind === "body") {
    try {
      return { model, ...JSON.parse(text) };
    } catch (error) {
      throw new Error(`The body is not valid JSON: ${error.message}`);
    }
  }
  const request = { model };
  if (kind === "completion") request.prompt = text;
  else request.messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: text }];
  if (user) request.user = user;
  if (session) request.session_id = session;
  return request;
}

const OUTCOMES = { placed: ["ok", "gets a replica"], queued: ["warn", "waits"], refused: ["bad", "is refused"] };

function Answer({ answer }) {
  const [kind, word] = OUTCOMES[answer.outcome];
  const facts = [
    ["Model", answer.model && `${visible(answer.model)}${answer.model === answer.requested_model ? "" : `, asked for ${visible(answer.requested_model)}`}`],
    ["Version", answer.version], ["Route", answer.route && visible(answer.route)], ["Because", answer.route_reason && visible(answer.route_reason)],
    ["Tenant", visible(answer.tenant) || "this machine"], ["Tier", answer.tier], ["Prompt", `about ${plural(answer.prompt_tokens, "token")}`],
    ["Output", answer.output_tokens ? `${plural(answer.output_tokens, "token")} expected` : null], ["Policy", answer.policy], ["Wait", answer.wait_s === null ? null : `about ${duration(answer.wait_s)}`],
  ].filter(([, value]) => value);
  const { candidates, excluded } = answer;
  return html`<div class="side-form"><${Card} title=${answer.replica ? visible(answer.replica) : "No replica now"} actions=${html`<button class="btn" onClick=${() => copyText(JSON.stringify(answer, null, 2), "The answer")}>Copy as JSON</button> <${Pill} kind=${kind}>${word}<//>`}>
      <p>${visible(answer.sentence)}</p><dl class="facts">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl><//>
    ${candidates.length ? html`<${Card} title="Candidates" note=${`predicted seconds by part${answer.candidate_count > candidates.length ? `; the cheapest ${candidates.length} of ${answer.candidate_count}` : ""}`}>
      <${CostBars} candidates=${candidates} chosen=${answer.replica} /><${Candidates} label="Candidates" candidates=${candidates} chosen=${answer.replica} /><//>` : null}
    ${excluded.length ? html`<${Card} title="Replicas that are left out" note=${answer.excluded_count > excluded.length ? `the first ${excluded.length} of ${answer.excluded_count}` : ""}>
      <${Table} label="Replicas that are left out" columns=${EXCLUDED_COLUMNS} rows=${excluded} rowKey=${(row) => row.replica} height=${220} /><//>` : null}</div>`;
}

const EXCLUDED_COLUMNS = [
  { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "reason", label: "Reason", value: (row) => visible(row.reason) },
];

function Prefixes({ model }) {
  const maps = useResource(query("admin/routing/prefixes", { model }), 15000);
  return html`<${Resource} of=${maps} height=${240}>${({ data }) => data.map((map) => html`<${PrefixMap} key=${map.version} map=${map} />`)}<//>`;
}

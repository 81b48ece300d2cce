// The prefixes that recent prompts share, by the replicas that have them cached: a matrix of which each row can be opened.
import { html } from "../vendor.js";
import { age, count, exact, partOf, plural, visible } from "../core/format.js";
import { link, route, setQuery } from "../core/router.js";
import { useNames } from "./names.js";
import { Card, Name } from "./parts.js";
import { Table } from "./table.js";

const ROW_PX = 26, WIDE_BAR_PX = 260, NARROW_BAR_PX = 100, LABEL_PX = 96, CELL_PX = 22, HEAD_PX = 92;
const MAX_NAME = 18;
const isNarrow = matchMedia("(max-width: 600px)");

export function PrefixMap({ map }) {
  const names = useNames();
  const { prefixes, replicas } = map;
  const chosen = prefixes.find(({ id }) => id === route.value.query.prefix);
  const note = `of the last ${plural(map.recent_requests, "request")} with a prompt of at least 256 bytes${map.since ? `, since ${age(map.since)}` : ""}`;
  return html`<${Card} title=${`Cached prefixes of ${visible(map.model)}${map.version ? ` ${map.version.slice(0, 12)}` : ""}`} note=${note}>
      ${prefixes.length ? html`<p class="s">A bar shows where a part lies in its prompts, from their beginning. A square is filled as far as the replica has the part cached. The gateway keeps hashes of prompts, no texts.</p>
        <${Matrix} prefixes=${prefixes} replicas=${replicas} chosen=${chosen?.id} />
        ${map.replica_count > replicas.length ? html`<p class="s">${partOf(replicas.length, map.replica_count, "replica")} ${replicas.length === 1 ? "is" : "are"} shown: those that have most of these prefixes.</p>` : null}
        ${chosen ? html`<${Prefix} prefix=${chosen} names=${names} />` : null}
        <${Table} label="Prefixes" columns=${columnsFor(names)} rows=${prefixes} rowKey=${(row) => row.id} height=${260} csv="cached-prefixes.csv" />`
      : html`<p class="empty">No request with a prompt of at least 256 bytes was placed since this gateway started. Shorter prompts have no block that could be shared.</p>`}<//>
    <${Card} title="Prefix caches" note="as the gateway knows them"><${Table} label="Prefix caches" columns=${CACHE_COLUMNS} rows=${replicas} rowKey=${(row) => row.replica} height=${220} csv="prefix-caches.csv" /><//>`;
}

function Matrix({ prefixes, replicas, chosen }) {
  const longest = Math.max(...prefixes.map(({ start_tokens: start, tokens }) => start + tokens));
  const barPx = isNarrow.matches ? NARROW_BAR_PX : WIDE_BAR_PX;
  const width = barPx + LABEL_PX + replicas.length * CELL_PX + HEAD_PX, height = HEAD_PX + prefixes.length * ROW_PX;
  const cellX = (index) => barPx + LABEL_PX + index * CELL_PX;
  return html`<div class="rows" role="region" tabindex="0" aria-label="Map of cached prefixes"><svg class="map" width=${width} height=${height} role="group" aria-label="Prefixes by replica">
    <g aria-hidden="true"><text x="0" y=${HEAD_PX - 8}>0</text><text x=${barPx} y=${HEAD_PX - 8} text-anchor="end">${plural(longest, "token")}</text>
      ${replicas.map(({ replica }, index) => html`<text key=${replica} transform=${`translate(${cellX(index) + 12} ${HEAD_PX - 6}) rotate(-55)`}>${shorten(visible(replica))}<title>${visible(replica)}</title></text>`)}</g>
    ${prefixes.map((prefix, row) => {
      const y = HEAD_PX + row * ROW_PX, x = (prefix.start_tokens / longest) * barPx;
      return html`<a key=${prefix.id} href=${link("routing", [], { ...route.value.query, prefix: prefix.id })} aria-label=${describe(prefix)} aria-current=${prefix.id === chosen ? "true" : undefined}
        onClick=${(event) => { event.preventDefault(); setQuery({ prefix: prefix.id }); }}>
        <rect class="row-area" x="0" y=${y} width=${width} height=${ROW_PX} />
        <rect class="bar" x=${x} y=${y + 5} width=${Math.max(2, (prefix.tokens / longest) * barPx - 1)} height=${ROW_PX - 10} rx="2" />
        <text x=${barPx + 10} y=${y + 17}>${plural(prefix.requests, "request")}</text>
        ${replicas.map(({ replica }, index) => html`<${Cell} key=${replica} x=${cellX(index)} y=${y + 5} share=${(prefix.cached_tokens[replica] ?? 0) / prefix.tokens} name=${replica} />`)}</a>`;
    })}</svg></div>`;
}

function Cell({ x, y, share, name }) {
  const size = ROW_PX - 10, filled = size * share;
  return html`<g><rect class="cell" x=${x} y=${y} width=${size} height=${size} rx="2" /><rect class="held" x=${x} y=${y + size - filled} width=${size} height=${filled} rx="2" />
    <title>${`${visible(name)}: ${Math.round(share * 100)} %`}</title></g>`;
}

const shorten = (name) => (name.length > MAX_NAME ? `${name.slice(0, MAX_NAME - 1)}…` : name);
const describe = ({ start_tokens: start, tokens, requests, holders }) => `${plural(tokens, "token")} after ${exact(start)}, in ${plural(requests, "request")}, cached whole by ${plural(holders, "replica")}`;

function Prefix({ prefix, names }) {
  const holders = Object.entries(prefix.cached_tokens).sort((a, b) => b[1] - a[1]);
  const facts = [
    ["Prefix", html`<${Name} value=${prefix.id} />`], ["Part", `tokens ${exact(prefix.start_tokens)} to ${exact(prefix.start_tokens + prefix.tokens)} of its prompts, by estimate`],
    ["Requests", `${exact(prefix.requests)}, the latest ${age(prefix.last_sent_at)}`], ["Tenants", Object.entries(prefix.tenants).map(([tenant, number]) => `${visible(names(tenant)) || "this machine"} ${number}`).join(", ")],
    ["Cached by", holders.map(([name, tokens]) => `${visible(name)} ${count(tokens)}`).join(", ") || "no replica any more"],
  ];
  return html`<dl class="facts tail">${facts.map(([name, value]) => [html`<dt key=${`${name}-term`}>${name}</dt>`, html`<dd key=${name}>${value}</dd>`])}</dl>`;
}

const columnsFor = (names) => [
  { key: "id", label: "Prefix", value: (row) => row.id, cell: (row) => html`<a href=${link("routing", [], { ...route.value.query, prefix: row.id })}><${Name} value=${row.id} /></a>` },
  { key: "parent", label: "Continues", value: (row) => row.parent ?? "", cell: (row) => (row.parent ? html`<${Name} value=${row.parent} />` : "–") },
  { key: "start_tokens", label: "After tokens", isNumber: true, value: (row) => row.start_tokens, cell: (row) => exact(row.start_tokens) },
  { key: "tokens", label: "Tokens", isNumber: true, value: (row) => row.tokens, cell: (row) => exact(row.tokens) },
  { key: "requests", label: "Requests", isNumber: true, value: (row) => row.requests, cell: (row) => exact(row.requests) },
  { key: "holders", label: "Replicas with all of it", isNumber: true, value: (row) => row.holders },
  { key: "tenants", label: "Tenants", value: (row) => Object.keys(row.tenants).map((tenant) => visible(names(tenant)) || "this machine").join(", ") },
  { key: "last_sent_at", label: "Last request", value: (row) => row.last_sent_at, cell: (row) => age(row.last_sent_at) },
];
const CACHE_COLUMNS = [
  { key: "replica", label: "Replica", value: (row) => visible(row.replica) },
  { key: "source", label: "Known by", value: (row) => row.source, cell: (row) => (row.source === "events" ? "its KV events" : "an estimate from the prompts sent there") },
  { key: "tokens", label: "Cached tokens", isNumber: true, value: (row) => row.tokens, cell: (row) => exact(row.tokens) },
];

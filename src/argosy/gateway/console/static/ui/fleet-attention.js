// What of the declared fleet needs attention: each a sentence, its cause and one action.
import { html } from "../vendor.js";
import { plural, shortDigests, visible } from "../core/format.js";
import { link } from "../core/router.js";

const WAITING = ["paused", "inconclusive"];

export function findFleetItems(fleet) {
  if (!fleet) return [];
  const items = [];
  if (!fleet.has_leader) {
    items.push({ kind: "bad", word: "Page", text: html`No controller leads the fleet <b>${visible(fleet.fleet)}</b>, so nothing is started, healed or scaled. Start one with <code>argosy up</code>.`, href: link("events"), action: "See the events" });
  }
  const models = new Map(fleet.pools.map(({ pool, model }) => [pool, model]));
  for (const pool of fleet.pools) {
    if (pool.ready < pool.minimum) { // a replica that fails has an item of its own
      const cause = fleet.replicas.find((replica) => replica.pool === pool.pool && !["ready", "failed"].includes(replica.phase) && replica.reason);
      items.push({ kind: "bad", word: "Page", text: html`The pool <b>${visible(pool.pool)}</b> has ${pool.ready} of at least ${plural(pool.minimum, "replica")}${cause ? `. ${visible(cause.name)} is ${cause.phase}: ${visible(cause.reason)}` : ""}.`, href: link("models", [pool.model]), action: "Open the pool" });
    }
    if (pool.rollout) items.push(...findRolloutItems(pool));
  }
  for (const replica of fleet.replicas) {
    if (replica.phase === "failed") {
      const model = models.get(replica.pool);
      items.push({ kind: "bad", word: "Page", text: html`Replica <b>${visible(replica.name)}</b> does not stay up: ${visible(replica.reason)}.`, href: link("models", model ? [model] : [], { replica: replica.name }), action: "Open the replica" });
    }
  }
  return items;
}

function findRolloutItems({ pool, model, rollout }) {
  const item = (kind, word, text, action) => [{ kind, word, text: html`The rollout of <b>${visible(pool)}</b> ${text}`, href: link("models", [model]), action }];
  const summary = shortDigests(rollout.summary);
  const { current, verdicts } = rollout.rollouts;
  if (WAITING.includes(current.state)) return item("warn", "Ticket", `waits for a person. It is ${summary}.`, "Decide");
  if (rollout.needs_promotion) return item("warn", "Ticket", `has enough evidence, and its plan leaves the next step to a person.`, "Promote or abort it");
  if (["rolling_back", "rolled_back", "cleaning"].includes(current.state)) return item("bad", "Ticket", `goes back to the old version. It is ${summary.replaceAll("_", " ")}.`, "See why");
  if (rollout.can_retry) {
    const cause = verdicts.find(({ digest }) => digest === current.candidate)?.reason ?? current.cause;
    return item("bad", "Ticket", `was rolled back: ${shortDigests(cause)}. The declared version is not tried again by itself.`, "See why");
  }
  return [];
}

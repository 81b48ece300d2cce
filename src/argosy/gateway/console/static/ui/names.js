// Names of organisations, projects, keys and users by id, for tables whose rows have ids.
import { useMemo } from "../vendor.js";
import { may, useResource } from "../core/api.js";

export function useNames() {
  const isShown = may("viewer");
  const organisations = useResource(isShown ? "admin/organisations?limit=1000" : null);
  const projects = useResource(isShown ? "admin/projects?limit=1000" : null);
  const keys = useResource(isShown ? "admin/keys?limit=1000" : null);
  const users = useResource(isShown ? "admin/users?limit=1000" : null);
  return useMemo(() => {
    const names = new Map();
    for (const { data } of [organisations, projects, keys, users]) {
      for (const record of data?.data ?? []) names.set(record.id, record.name ?? record.email);
    }
    const nameOf = (id) => (id ? names.get(id) ?? id : "");
    // The id of a name that someone typed. Ids of a kind begin with it, since a project and a key may have the same name.
    nameOf.find = (text, kind = "") => (names.has(text) ? text : [...names].findLast(([id, name]) => name === text && id.startsWith(kind))?.[0] ?? text);
    return nameOf;
  }, [organisations.data, projects.data, keys.data, users.data]);
}

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
    const ids = new Map([...names].map(([id, name]) => [name, id]));
    const nameOf = (id) => (id ? names.get(id) ?? id : "");
    nameOf.find = (text) => (names.has(text) ? text : ids.get(text) ?? text); // the id of a name that someone typed
    return nameOf;
  }, [organisations.data, projects.data, keys.data, users.data]);
}

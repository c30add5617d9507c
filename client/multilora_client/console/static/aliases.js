// The names that stand for adapters, each adapter with its share of the requests.

import { el } from "./dom.js";
import { percent } from "./format.js";

export class AliasList {
  constructor(root) {
    this._root = root;
    this._list = el("dl", { class: "facts aliases" });
    root.append(this._list);
    this._drawn = "";
  }

  update(aliases) {
    // A key may use an alias and not see its members.
    const shown = aliases.filter((alias) => alias.members.length);
    const key = JSON.stringify(shown);
    if (key === this._drawn) return;
    this._drawn = key;
    this._root.hidden = !shown.length;
    this._list.replaceChildren(...shown.flatMap((alias) => [
      el("dt", { title: alias.tenant ? `of tenant ${alias.tenant}` : "" }, alias.name),
      el("dd", {}, this._shares(alias)),
    ]));
  }

  _shares({ members }) {
    const total = members.reduce((sum, member) => sum + member.weight, 0);
    return members.map((member) => `${member.name} ${percent(member.weight / total)}`).join(", ");
  }
}

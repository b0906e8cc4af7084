// Topics: searched, sorted and paged by the server.

import { change, link } from "./address.js";
import { ago, bytes, count, number, topicName } from "./format.js";
import { Counting } from "./overview.jsx";
import { Answer, Ask, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

const PAGE = 50;

const COLUMNS = [
  { title: "Topic", key: "name", wrap: true, sort: "name", show: (row) => <a href={link(["topics", row.name])}>{topicName(row.name)}</a> },
  { title: "Pending", key: "pending", sort: "pending", number },
  { title: "Backlog", key: "backlog", sort: "backlog", number },
  { title: "Oldest due", key: "oldest_due_ms", sort: "oldest_due_ms", show: (row) => ago(row.oldest_due_ms) },
  { title: "Subscriptions", key: "subscriptions", sort: "subscriptions", number },
  { title: "Consumers", key: "consumers", sort: "consumers", number },
  { title: "Sent", key: "sent", sort: "sent", number },
  { title: "Dead", key: "dead_lettered", sort: "dead_lettered", number },
  { title: "Main log", key: "stored_bytes", sort: "stored_bytes", number: bytes },
];

/** What is pending is not known of topics before all partitions are counted. */
const UNCOUNTED = COLUMNS.map((each) => (each.key === "pending" ? { ...each, number: () => "…" } : each));

export function Topics({ query }) {
  const { search = "", sort = "name", namespace } = query;
  const descending = query.descending === "true", offset = Number(query.offset ?? 0);
  const given = { search, sort, descending, ...(namespace && { namespace }) };
  const [page] = useWatch([["topic_rows", { ...given, offset, limit: PAGE }]]);
  const all = async () => {
    const found = [];
    for (;;) {
      const { rows, total } = await ask("topic_rows", { ...given, offset: found.length, limit: 1000 });
      found.push(...rows);
      if (!rows.length || found.length >= total) return found;
    }
  };
  return (
    <>
      <div class="title">
        <h1>Topics</h1>
        <Ask label="Create a topic" title="Create a topic" needs="create_topic" fields={[{ name: "topic", label: "Name", required: true, value: namespace ? `${namespace}/` : "", help: "A name, or tenant/namespace/name" }]}
          act={({ topic }) => ask("create_topic", { topic })} done={(made) => (made ? "The topic is there." : "It was there already.")} />
      </div>
      <input class="search" type="search" placeholder="Search" aria-label="Search topics" value={search}
        onInput={(event) => change({ search: event.target.value, offset: "" }, true)} />
      <Answer answer={page}>
        {({ rows, total, known, complete }) => (
          <>
            <Counting complete={complete} />
            <Table name="topics" caption="Topics" columns={complete ? COLUMNS : UNCOUNTED} rows={rows} all={all} sort={{ by: sort, descending }}
              onSort={(by) => change({ sort: by === "name" ? "" : by, descending: by === sort ? !descending : by !== "name", offset: "" })}
              empty={!complete ? "They are being counted." : search ? "No name has this in it." : "There are no topics."}
              actions={<span class="quiet" role="status">{total === known ? count(total, "topic") : `${number(total)} of ${count(known, "topic")}`}</span>} />
            <Pages offset={offset} total={total} size={PAGE} />
          </>
        )}
      </Answer>
    </>
  );
}

function Pages({ offset, total, size }) {
  if (total <= size && !offset) return null;
  const to = (at) => change({ offset: at || "" });
  return (
    <nav class="pages" aria-label="Pages">
      <button disabled={!offset} onClick={() => to(Math.max(offset - size, 0))}>Before</button>
      <span>{number(offset + 1)} to {number(Math.min(offset + size, total))} of {number(total)}</span>
      <button disabled={offset + size >= total} onClick={() => to(offset + size)}>After</button>
    </nav>
  );
}

// Workers, and all others that receive: what is handed out and for how long, what failed, what is tried again.

import { link } from "./address.js";
import { duration, number, topicName } from "./format.js";
import { Answer, Ask, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

export function Workers() {
  const [receiving] = useWatch([["receiving", {}]]);
  const columns = [
    { title: "Topic", key: "topic", wrap: true, show: (row) => <a href={link(["topics", row.topic])}>{topicName(row.topic)}</a> },
    { title: "Subscription", key: "name", show: ({ name, paused }) => <>{name}{paused && <span class="tag">paused</span>}</> },
    { title: "Consumers", key: "consumers", number },
    { title: "Backlog", key: "backlog", number },
    { title: "Running", key: "unacknowledged", number },
    { title: "Longest for", key: "longest_running_ms", show: (row) => duration(row.longest_running_ms) },
    { title: "To be tried again", key: "redelivering", number },
    { title: "Delivered again", key: "redelivered", number },
    { title: "Died", key: "dead_lettered", show: (row) => (row.dead_lettered ? <a href={link(["letters"], { topic: row.topic })}>{number(row.dead_lettered)}</a> : "0") },
    { title: "", show: (row) => <Pause row={row} /> },
  ];
  return (
    <>
      <h1>Workers</h1>
      <Answer answer={receiving}>
        {(rows) => (
          <Table name="workers" caption="Workers" columns={columns} empty="Nobody receives. duelog worker MODULE:worker --connect DIR starts a worker."
            rows={rows.map(({ topic, subscription }) => ({ ...subscription, topic, id: `${topic} ${subscription.name}` }))} />
        )}
      </Answer>
    </>
  );
}

function Pause({ row: { topic, name, paused } }) {
  const at = { topic, subscription: name };
  return paused
    ? <Ask label="Resume" name={name} needs="resume" title={`Resume ${name}`} act={() => ask("resume", at)} done="It goes on."><p>Its workers are handed messages again.</p></Ask>
    : <Ask label="Pause" name={name} needs="pause" title={`Pause ${name}`} act={() => ask("pause", at)} done="It is paused."><p>Workers of this subscription are handed nothing until it is resumed; what runs goes on.</p></Ask>;
}

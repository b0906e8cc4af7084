// Connections: which programs are connected, with what producers and consumers, and what of the limits they use.

import { bytes, number, short, topicName } from "./format.js";
import { Answer, Gauge, Table } from "./parts.jsx";
import { useWatch } from "./server.js";

const rate = (value) => (value == null ? "–" : `${short(value < 10 ? Math.round(value * 10) / 10 : Math.round(value))} /s`);

export function Connections() {
  const [connections] = useWatch([["connections", {}]]);
  return (
    <>
      <h1>Connections</h1>
      <Answer answer={connections}>
        {({ connections: rows, parts, limits, total }) => (
          <>
            {limits.map((each) => <Gauge key={each.name} {...each} show={bytes} />)}
            {rows.length < total && <p class="quiet">The first of {number(total)} are shown.</p>}
            <Table name="connections" caption="Connections" rows={rows.map((each) => ({ ...each, id: each.address }))} empty="No other program is connected." columns={[
              { title: "Client", key: "client", wrap: true },
              { title: "Name", key: "name", wrap: true },
              { title: "Kind", key: "kind" },
              { title: "From", key: "address" },
              { title: "Since", key: "since_ms", time: true },
              { title: "Producers", key: "producers", number },
              { title: "Consumers", key: "consumers", number },
              { title: "Permits", key: "permits", number },
              { title: "Holds", key: "held", number },
              { title: "In", key: "messages_in", number },
              { title: "Out", key: "messages_out", number },
              { title: "Topics", key: "topics", wrap: true, show: (row) => row.topics.map(topicName).join(", ") },
            ]} />
            <h2>Producers and consumers</h2>
            <p class="quiet">Rates are those of the last full minute, or of statsUpdateFrequencyInSecs, as REST has them.</p>
            <Table name="producers and consumers" caption="Producers and consumers" empty="There is none." rows={parts.map((each, at) => ({ ...each, kind: each.subscription == null ? "producer" : "consumer", id: `${each.address} ${at}` }))} columns={[
              { title: "Kind", key: "kind" },
              { title: "Topic", key: "topic", wrap: true, show: (row) => topicName(row.topic) },
              { title: "Subscription", key: "subscription", wrap: true },
              { title: "Name", key: "name", wrap: true },
              { title: "From", key: "address" },
              { title: "Messages", key: "messages", number },
              { title: "Rate", key: "rate", number: rate },
              { title: "Bytes", key: "bytes_rate", number: (value) => (value == null ? "–" : `${bytes(value)}/s`) },
              { title: "Permits", key: "permits", number },
              { title: "Holds", key: "held", number },
            ]} />
          </>
        )}
      </Answer>
    </>
  );
}

// Connections: which programs are connected, and what of the limits they use.

import { bytes, number, time, topicName } from "./format.js";
import { Answer, Table } from "./parts.jsx";
import { useWatch } from "./server.js";

export function Connections() {
  const [connections] = useWatch([["connections", {}]]);
  return (
    <>
      <h1>Connections</h1>
      <Answer answer={connections}>
        {({ connections: rows, limits }) => (
          <>
            {limits.map(({ name, used, most }) => (
              <label class="gauge">{name} <meter min={0} max={most || 1} high={(most || 1) * 0.8} value={used} /> <span class="figure">{bytes(used)} of {most ? bytes(most) : "no limit"}</span></label>
            ))}
            <Table name="connections" caption="Connections" rows={rows} empty="No other program is connected." columns={[
              { title: "Client", key: "client" },
              { title: "From", key: "address" },
              { title: "Since", key: "since_ms", time: true },
              { title: "Producers", key: "producers", number },
              { title: "Consumers", key: "consumers", number },
              { title: "Permits", key: "permits", number },
              { title: "Holds", key: "held", number },
              { title: "In, messages", key: "messages_in", number },
              { title: "Out, messages", key: "messages_out", number },
              { title: "Topics", key: "topics", show: (row) => row.topics.map(topicName).join(", ") },
            ]} />
          </>
        )}
      </Answer>
    </>
  );
}

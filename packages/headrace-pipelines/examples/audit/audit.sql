-- audit.sql
CREATE TABLE audit (
  id text PRIMARY KEY,
  "time" timestamptz NOT NULL,
  service_id text NOT NULL,
  audit_type text NOT NULL,
  audit_status text NOT NULL,
  topic text,
  partition integer,
  first_offset bigint,
  last_offset bigint,
  count bigint,
  ranges jsonb,
  key text,
  correlation_id text,
  traceability_id text,
  caller text,
  consumer_group text,
  redrive_of text,
  replay text,
  reason text,
  action text,
  target text,
  address text,
  stacktrace text
);
CREATE INDEX ON audit ("time");
CREATE INDEX ON audit (correlation_id);
CREATE INDEX ON audit (topic, partition, first_offset);

-- usage: wrk ... -s bench/wrk.lua URL -- METHOD BODY_FILE "Name: value"...
-- Sends one request again and again; prints JSON, times in milliseconds.

function init(words)
  wrk.method = words[1]
  local file = assert(io.open(words[2], "rb"))
  wrk.body = file:read("*a")
  file:close()
  for at = 3, #words do
    local name, value = words[at]:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{"requests": %d, "errors": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "longest_ms": %f}\n',
    summary.requests, errors.connect + errors.read + errors.write + errors.timeout + errors.status,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end

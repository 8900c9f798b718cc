/*
 * Writes the records of a flow in real-time mode exactly once: each transaction has rows of one source partition, in
 * order, and the position after them. Rows before the position are repeats, and are dropped.
 *
 * Janino, which Spark brings along, compiles this file. So there are no lambdas, generics need casts, and no method is
 * private: Janino would make it static, and let `synchronized` lock the class.
 * Source: KIP-98, KIP-447, KIP-890.
 */
package headrace;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.FeatureMetadata;
import org.apache.kafka.clients.admin.FinalizedVersionRange;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ApiException;
import org.apache.kafka.common.errors.InvalidRequestException;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;
import org.apache.spark.util.TaskCompletionListener;

public class TransactionWriter extends ForeachWriter implements TaskCompletionListener {
  static final int TOPIC = 0, KEY = 1, VALUE = 2, HEADERS = 3, SOURCE_TOPIC = 4, SOURCE_PARTITION = 5, OFFSET = 6;
  static final long MOST_BYTES = 8000000L, ROW_BYTES = 300L, RETRY_MS = 60000L, PAUSE_MS = 500L, RESPONSE_S = 15L;
  static final Map IDLE = new ConcurrentHashMap();
  /* Partitions by name, whose task has ended: the next task of this process need not fence itself. */

  private final HashMap settings;
  private final String flowGroup;
  private final long lingerMs;
  private transient HashMap partitions;

  public TransactionWriter(Map settings, String flowGroup, long lingerMs) {
    this.settings = new HashMap(settings);
    this.flowGroup = flowGroup;
    this.lingerMs = lingerMs;
  }

  /** Returns the level of transactions that the brokers have agreed on: from 2 on, no late request can end another. */
  public int transactionVersion() throws InterruptedException, ExecutionException {
    Admin admin = Admin.create(settings);
    try {
      FeatureMetadata found = (FeatureMetadata) admin.describeFeatures().featureMetadata().get();
      FinalizedVersionRange range = (FinalizedVersionRange) found.finalizedFeatures().get("transaction.version");
      return range == null ? 0 : (int) range.maxVersionLevel();
    } finally {
      admin.close(Duration.ZERO);
    }
  }

  public boolean open(long partitionId, long epochId) {
    partitions = new HashMap();
    TaskContext.get().addTaskCompletionListener((TaskCompletionListener) this);
    return true;
  }

  public void process(Object record) {
    Row row = (Row) record;
    TopicPartition source = new TopicPartition(row.getString(SOURCE_TOPIC), row.getInt(SOURCE_PARTITION));
    Partition partition = (Partition) partitions.get(source);
    if (partition == null) {
      String group = flowGroup + "." + TaskContext.get().getLocalProperty("sql.streaming.queryId");
      String name = group + "." + source.topic() + "." + source.partition();
      partition = (Partition) IDLE.remove(name);
      if (partition == null) {
        partition = new Partition(name, settings, group, source, lingerMs);
        partition.start();
      }
      partitions.put(source, partition);
      partition.reuse();
    }
    partition.add(row);
  }

  /** Waits until all rows are committed: after this, the checkpoint does not have them again. */
  public void close(Throwable error) {
    if (error != null) {
      onTaskCompletion(null);
      return;
    }
    for (Iterator all = partitions.values().iterator(); all.hasNext();) {
      Partition partition = (Partition) all.next();
      partition.drain();
      all.remove();
      IDLE.put(partition.getName(), partition);
    }
  }

  public void onTaskCompletion(TaskContext context) {
    for (Iterator all = partitions.values().iterator(); all.hasNext();) {
      ((Partition) all.next()).end(null);
    }
    partitions.clear();
  }

  /** The rows of one source partition, on their way. Its thread is the only one that uses the producers. */
  static class Partition extends Thread {
    private final Map settings;
    private final String group;
    private final TopicPartition source;
    private final long lingerMs;

    private ArrayList waiting = new ArrayList();
    private long waitingBytes = 0;
    private boolean busy = false;
    private Throwable failure = null;
    private boolean ended = false;

    private final KafkaProducer[] producers = new KafkaProducer[2];
    /* They take turns: Kafka completes the transaction of one while the other begins its own. */
    private int turn = 0;
    private long have = -1;
    private int written = 0;
    /* The last offset of which rows are committed, and how many. */
    private long at = -1;
    private int seen = 0;
    /* The offset of the last row that came, and how many of its rows have come. */

    Partition(String name, Map settings, String group, TopicPartition source, long lingerMs) {
      super(name);
      setDaemon(true);
      this.settings = settings;
      this.group = group;
      this.source = source;
      this.lingerMs = lingerMs;
    }

    synchronized void reuse() {
      at = -1;
    }

    synchronized void add(Row row) {
      while (waitingBytes > MOST_BYTES && failure == null) {
        pause();
      }
      check();
      waiting.add(row);
      byte[] value = (byte[]) row.get(VALUE);
      waitingBytes += ROW_BYTES + (value == null ? 0 : value.length);
      notifyAll();
    }

    synchronized void drain() {
      while ((busy || !waiting.isEmpty()) && failure == null) {
        pause();
      }
      check();
    }

    synchronized void end(Throwable cause) {
      failure = failure == null ? cause : failure;
      ended = true;
      notifyAll();
    }

    void check() {
      if (failure != null) {
        throw new RuntimeException("rows of " + source + " cannot be written: " + failure, failure);
      }
      if (ended) {
        throw new IllegalStateException("the task has ended");
      }
    }

    void pause() {
      try {
        wait();
      } catch (InterruptedException cause) {
        throw new RuntimeException(cause);
      }
    }

    synchronized ArrayList take() {
      busy = false;
      notifyAll();
      while (waiting.isEmpty() && !ended) {
        pause();
      }
      if (ended) {
        return null;
      }
      ArrayList rows = waiting;
      waiting = new ArrayList();
      waitingBytes = 0;
      busy = true;
      notifyAll();
      return rows;
    }

    public void run() {
      try {
        for (ArrayList rows = take(); rows != null; rows = take()) {
          long began = System.currentTimeMillis();
          write(rows);
          Thread.sleep(Math.max(0L, lingerMs - (System.currentTimeMillis() - began)));
        }
      } catch (Throwable cause) {
        end(cause);
      } finally {
        close();
      }
    }

    /** Writes rows, and tries again with a new producer while Kafka does not answer. */
    void write(ArrayList rows) throws Exception {
      long end = 0;
      while (true) {
        long atBefore = at;
        int seenBefore = seen;
        try {
          if (producers[0] == null) {
            open();
          }
          transact(rows);
          return;
        } catch (Exception cause) {
          close();
          long now = System.currentTimeMillis();
          end = end == 0 ? now + RETRY_MS : end;
          if (isLasting(cause) || now > end || ended) {
            throw cause;
          }
          System.err.println(getName() + ": trying again: " + cause);
          at = atBefore;
          seen = seenBefore;
          Thread.sleep(PAUSE_MS);
        }
      }
    }

    /** Ends the transactions that a predecessor left open; only then is the position final. */
    void open() {
      HashMap own = new HashMap(settings);
      own.put("key.serializer", ByteArraySerializer.class.getName());
      own.put("value.serializer", ByteArraySerializer.class.getName());
      for (int number = 0; number < producers.length; number++) {
        own.put("transactional.id", getName() + "." + number);
        producers[number] = new KafkaProducer(own);
        producers[number].initTransactions();
      }
      HashMap reading = new HashMap(settings);
      reading.put("group.id", group);
      reading.put("isolation.level", "read_committed");
      reading.put("enable.auto.commit", "false");
      reading.put("key.deserializer", ByteArrayDeserializer.class.getName());
      reading.put("value.deserializer", ByteArrayDeserializer.class.getName());
      KafkaConsumer consumer = new KafkaConsumer(reading);
      try {
        Map found = consumer.committed(Collections.singleton(source), Duration.ofSeconds(RESPONSE_S));
        OffsetAndMetadata position = (OffsetAndMetadata) found.get(source);
        have = position == null ? -1 : position.offset() - 1;
        written = position == null ? 0 : rowsOf(position);
      } finally {
        consumer.close(Duration.ZERO);
      }
    }

    int rowsOf(OffsetAndMetadata position) {
      try {
        return Integer.parseInt(position.metadata());
      } catch (NumberFormatException cause) {
        String text = "another program has set the position of group " + group + " on " + source;
        throw new InvalidRequestException(text + ": discard the checkpoint of the flow", cause);
      }
    }

    void transact(ArrayList rows) {
      KafkaProducer producer = producers[turn];
      boolean begun = false;
      for (Iterator all = rows.iterator(); all.hasNext();) {
        Row row = (Row) all.next();
        long offset = row.getLong(OFFSET);
        seen = offset == at ? seen + 1 : 1;
        at = offset;
        if (offset < have || (offset == have && seen <= written)) {
          continue;
        }
        if (!begun) {
          producer.beginTransaction();
          begun = true;
        }
        producer.send(record(row));
      }
      if (begun) {
        OffsetAndMetadata position = new OffsetAndMetadata(at + 1, Integer.toString(seen));
        producer.sendOffsetsToTransaction(Collections.singletonMap(source, position), new ConsumerGroupMetadata(group));
        producer.commitTransaction();
        turn = (turn + 1) % producers.length;
        have = at;
        written = seen;
      }
    }

    void close() {
      for (int number = 0; number < producers.length; number++) {
        if (producers[number] != null) {
          producers[number].close(Duration.ZERO);
          producers[number] = null;
        }
      }
    }

    static ProducerRecord record(Row row) {
      ProducerRecord made = new ProducerRecord(row.getString(TOPIC), row.get(KEY), row.get(VALUE));
      List headers = row.isNullAt(HEADERS) ? Collections.EMPTY_LIST : row.getList(HEADERS);
      for (Iterator all = headers.iterator(); all.hasNext();) {
        Row header = (Row) all.next();
        made.headers().add(header.getString(0), (byte[]) header.get(1));
      }
      return made;
    }

    static boolean isLasting(Throwable cause) {
      boolean refused = false;
      for (Throwable each = cause; each != null; each = each.getCause()) {
        if (each instanceof RetriableException) {
          return false;
        }
        refused = refused || each instanceof ApiException;
      }
      return refused;
    }
  }
}

export default {
  template: `
  <div class="hr-scroll" role="region" tabindex="0" :aria-label="caption">
    <table class="hr-table">
      <caption>{{ caption }}</caption>
      <thead><tr>
        <th v-for="c in columns" :key="c.name" scope="col" :class="'hr-' + c.kind"
          :aria-sort="order[0] !== c.name ? null : order[1] > 0 ? 'ascending' : 'descending'">
          <template v-if="c.kind === 'plot'">{{ c.label }}</template>
          <button v-else type="button" class="hr-sort" @click="$emit('sort', c.name)">{{ c.label }}</button></th>
        <th v-if="buttons.length" scope="col">Actions</th>
      </tr></thead>
      <tbody>
        <tr v-for="row in rows" :key="row._key">
          <td v-for="(c, i) in columns" :key="c.name" :class="'hr-' + c.kind">
            <a v-if="i === 0 && row._link" :href="row._link">{{ row[c.name] }}</a>
            <span v-else-if="c.kind === 'state'" class="hr-badge" :data-level="row._level">{{ row[c.name] }}</span>
            <svg v-else-if="c.kind === 'plot'" viewBox="0 0 100 24" role="img" :aria-label="c.label"
              preserveAspectRatio="none"><polyline :points="row[c.name]"></polyline></svg>
            <template v-else>{{ row[c.name] }}</template>
          </td>
          <td v-if="buttons.length">
            <button v-for="b in row._buttons || buttons" :key="b" type="button" :disabled="!!refusal" :title="refusal || b"
              :aria-label="b + ' ' + row[columns[0].name]" @click="$emit('press', { button: b, key: row._key })"
              >{{ b }}</button>
          </td>
        </tr>
        <tr v-if="!rows.length"><td :colspan="columns.length + 1">{{ empty }}</td></tr>
      </tbody>
    </table>
  </div>`,
  props: { caption: String, columns: Array, rows: Array, buttons: Array, refusal: String, empty: String, order: Array },
};

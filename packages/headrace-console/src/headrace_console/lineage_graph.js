export default {
  template: `
  <div class="hr-scroll" role="region" tabindex="0" :aria-label="label">
    <svg class="hr-graph" role="img" :aria-label="label" :width="width" :height="height" :viewBox="'0 0 ' + width + ' ' + height">
      <defs>
        <marker id="hr-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
          <polygon points="0,0 8,4 0,8" fill="context-stroke"></polygon>
        </marker>
      </defs>
      <path v-for="(d, i) in lines" :key="i" :d="d" marker-end="url(#hr-arrow)"></path>
      <g v-for="box in boxes" :key="box.x + ' ' + box.y">
        <title>{{ box.title }}</title>
        <rect :class="'hr-' + box.kind" :x="box.x" :y="box.y" width="200" height="34" rx="5"></rect>
        <text :x="box.x + 8" :y="box.y + 22">{{ box.text }}</text>
      </g>
    </svg>
  </div>`,
  props: { label: String, width: Number, height: Number, lines: Array, boxes: Array },
};

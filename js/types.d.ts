// What the pack uses of ComfyUI's page, and what its server answers. Only the checks read this file.

interface Widget {
  name: string;
  label?: string;
  value: any;
  y?: number; // where the classic renderer has drawn it
  element?: HTMLElement; // of one that is no drawing
  setValue?(value: unknown, given: { e: null; node: GraphNode; canvas: App["canvas"] }): void;
  options: { values: string[]; advanced?: boolean };
  serialize?: boolean;
  callback?(value: unknown): void;
  computeSize?(width?: number): [number, number];
  computeLayoutSize?: unknown;
  onRemove?(): void;
}

interface WidgetOptions {
  serialize?: boolean;
  hideOnZoom?: boolean;
  margin?: number; // pixels
  getMinHeight?(): number;
  getMaxHeight?(): number;
}

interface GraphNode {
  flags?: { collapsed?: boolean };
  id: number | string;
  type: string;
  title: string;
  comfyClass?: string;
  mode?: number; // whether it is muted or bypassed
  graph: Graph;
  subgraph?: Graph;
  pos: [number, number];
  readonly boundingRect: ArrayLike<number>; // left, top, width, height with its title
  showAdvanced?: boolean;
  constructor: { nodeData?: { display_name?: string } };
  size: [number, number];
  properties?: Record<string, unknown>;
  inputs?: { name: string; type: string; link: number | null; widget?: { name: string } }[];
  outputs: { name: string; type: string }[];
  widgets: Widget[];
  isInputConnected(slot: number): boolean;
  getInputLink(slot: number): { origin_id: number | string; origin_slot: number } | null;
  getInputNode(slot: number): GraphNode | null;
  getOutputNodes(slot: number): GraphNode[] | null;
  addWidget(kind: string, name: string, value: unknown, act: () => void, options: WidgetOptions): Widget;
  addDOMWidget(name: string, kind: string, element: HTMLElement, options: WidgetOptions): Widget;
  computeSize(): [number, number];
  setSize(size: [number, number]): void;
  setDirtyCanvas(front: boolean, back: boolean): void;
  connect(slot: number, target: GraphNode, targetSlot: number): void;
  onExecuted?(output: any, ...rest: unknown[]): void;
  onRemoved?(...rest: unknown[]): void;
  onSerialize?(data: { size: number[]; widgets_values?: unknown[] }): void;
  onDragOver?(event: DragEvent): boolean;
  onDragDrop?(event: DragEvent): boolean;
}

interface Graph {
  id: string;
  nodes: GraphNode[];
  extra?: { ds?: { scale: number; offset: number[] } }; // what its file holds; ds: the view
  add(node: GraphNode): void;
  remove(node: GraphNode): void;
  getNodeById(id: number | string): GraphNode | undefined;
  setDirtyCanvas(front: boolean, back: boolean): void;
}

interface Prompt {
  output: Record<string, { class_type: string; inputs?: Record<string, unknown> }>;
  workflow: unknown;
}

interface Extension {
  name: string;
  settings?: object[];
  commands?: { id: string; label: string; icon: string; function: () => void }[];
  menuCommands?: { path: string[]; commands: string[] }[];
  nodeCreated?(node: GraphNode): void;
  getNodeMenuItems?(node: GraphNode): { content: string; callback(): void }[];
  setup?(): void;
  afterConfigureGraph?(): void;
}

interface SidebarTab {
  id: string;
  icon: string;
  title: string;
  tooltip: string;
  type: "custom";
  render(host: HTMLElement): void;
  destroy(): void;
}

interface App {
  graph?: Graph; // none yet while the editor loads
  rootGraph?: Graph; // of newer editors
  canvas: {
    graph?: Graph;
    canvas: HTMLCanvasElement;
    constructor: { active_canvas?: App["canvas"] };
    ds: { scale: number; offset: [number, number] };
    prompt(title: string, value: unknown, take: (text: string) => void, event: MouseEvent): void;
    setGraph(graph: Graph): void;
    selectNode(node: GraphNode): void;
    setDirty(front: boolean, back: boolean): void;
    selectItems(nodes: GraphNode[]): void;
    centerOnNode(node: GraphNode): void;
    emitBeforeChange(): void;
    emitAfterChange(): void;
  };
  ui?: { autoQueueEnabled: boolean; autoQueueMode: string };
  extensionManager: {
    toast: { add(toast: { severity: string; summary: string; detail: string; life: number }): void };
    dialog: {
      confirm(question: { title: string; message: string; type?: string }): Promise<boolean | null>;
      prompt(question: { title: string; message: string; defaultValue: string }): Promise<string | null | undefined>;
    };
    command: { execute(name: string): void };
    setting?: { get(name: string): string | undefined };
    workflow?: { activeWorkflow?: { activeMode?: string | null; initialMode?: string | null;
      changeTracker?: { undoRedo(event: KeyboardEvent): Promise<boolean> } } };
    registerSidebarTab(tab: SidebarTab): void;
  };
  registerExtension(extension: Extension): void;
  queuePrompt(number: number, count: number): void;
  handleFile?(file: File, ...rest: unknown[]): Promise<void>;
  graphToPrompt(): Promise<Prompt>;
  loadGraphData(workflow: unknown, clean: boolean, restore: boolean, name: string): Promise<void>;
  reloadNodeDefs(): Promise<void>;
}

interface Api {
  addEventListener(name: string, listen: (event: CustomEvent) => void): void;
  apiURL(route: string): string;
  fetchApi(route: string, options?: RequestInit): Promise<Response>;
  getWorkflowTemplates?(...given: unknown[]): Promise<Record<string, string[]>>;
  queuePrompt(number: number, prompt: Prompt, ...rest: unknown[]): Promise<unknown>;
}

declare module "*/scripts/app.js" {
  export const app: App;
  export const ComfyApp: { open_maskeditor?(): void; clipspace_return_node: unknown } | undefined;
}

declare module "*/scripts/api.js" {
  export const api: Api;
}

interface Window {
  LiteGraph?: {
    vueNodesMode?: boolean;
    registered_node_types: Record<string, { nodeData?: { display_name?: string; output?: string[] } }>;
    createNode(type: string): GraphNode | null;
  };
}

// --- what the server answers ------------------------------------------------------------------------------

type Point<Value> = [step: number, value: Value, lowest?: Value, highest?: Value]; // of several steps with their ends
type Curve = Point<number>[];
type ToldCurve = Point<number | null>[]; // null: not finite

interface Curves {
  loss: ToldCurve;
  validation: ToldCurve;
  rate: Record<string, ToldCurve>;
  concepts: Record<string, ToldCurve>;
  levels: Record<string, ToldCurve>;
}

// A run in the list, as trainer_core/runs/catalogue.py describes it; null: unknown, as in a damaged one.
interface ListedRun {
  run: string;
  name: string | null;
  title: string;
  status: "running" | "finished" | "stopped" | "empty" | "unreadable";
  sentence: string;
  failed?: boolean; // its last process ended by a failure, which the sentence tells
  paused?: boolean; // a person paused it
  step: number | null;
  steps: number | null;
  loss: number | null; // the mean that stands for the run, to order by
  loss_words: string; // the same with its name, as `say` builds it
  validation: { step: number; loss: number | null } | null;
  size: number; // bytes
  created: number; // seconds since 1970, as all times
  changed: number;
  thumbnail: string | null;
  base_model: string | null;
  rank: number | null;
  seconds: number | null; // that processes worked on it
  workflow: boolean;
}

interface Save {
  step: number;
  size: number; // bytes
  written: number | null;
  stays: boolean;
  lora: boolean;
  resumes: boolean; // a run can resume from it, or be forked
  problem?: string | null;
}

// A run by itself.
interface Run extends ListedRun {
  curves: Curves | null;
  best: number | null; // step
  saves: Save[];
  samples: string[];
  prompts: string[];
  notes: string[];
  settings: Record<string, unknown>; // by their full names
  nodes: NodeSettings[];
  files: { name: string; size: number }[];
  published: string[];
  pictures: number | null;
  odd: OddPicture[];
  begun_with: { step: number; run: string } | null;
  error?: undefined;
  unanswered?: undefined;
}

// A picture that stood out in a run: its name, that of its folder, and of its content.
interface OddPicture {
  name: string;
  folder: string;
  sha256: string;
}

// The settings of one node, as trainer_core/runs/detail.py groups them.
interface NodeSettings {
  node: string; // its id, "" for none
  title: string;
  number: string; // of the concept or the like, "" if there is one at most
  settings: { name: string; input: string; words: string; changed: boolean }[];
}

interface Failure {
  error: string;
  unanswered?: true;
}

// What an event tells of a run at work.
interface RunState {
  run?: string | null;
  node?: string;
  workflow?: string;
  prompt_id?: string;
  alive?: boolean;
  followed?: boolean; // another process trains it
  waiting?: unknown; // for what: the node's turn is still to come, and the run is the one before
  seen?: number; // bytes of its log
  step?: number;
  steps?: number;
  text?: string;
  details?: string[];
  memory?: { words: unknown; share: number }; // share: of all memory that is in use
  notes?: string[];
  note?: string;
  changed?: boolean;
  points?: StepPoint[];
}

interface StepPoint {
  step: number;
  loss: number | null;
  rate: Record<string, number | null>;
  concepts: Record<string, number | null>;
}

// What RunGraph draws.
interface GraphRun {
  name?: string | null;
  colour?: string;
  points?: Partial<Pick<Curves, "loss" | "validation" | "rate">>;
  saves?: { step: number; best: boolean }[];
  concepts?: Record<string, ToldCurve>;
  levels?: Record<string, ToldCurve>;
}

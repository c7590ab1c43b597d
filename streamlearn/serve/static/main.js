/** The page: a poller asks the daemon, and each view shows its part of the state. */

import { Api, ApiError } from "./api.js";
import { Controls } from "./controls.js";
import { DeadLetters } from "./dead_letters.js";
import { askForToken } from "./dialogs.js";
import { byId, setText } from "./dom.js";
import { Experts } from "./experts.js";
import { Forgetting } from "./forgetting.js";
import { clock } from "./format.js";
import { HoldoutCharts } from "./holdout_charts.js";
import { LossChart } from "./loss_chart.js";
import { Notice } from "./notice.js";
import { Poller } from "./poller.js";
import { PublicationTable } from "./publication_table.js";
import { RegimeTable } from "./regime_table.js";
import { Requests } from "./requests.js";
import { Ribbon } from "./ribbon.js";
import { ShiftTable } from "./shift_table.js";
import { SnapshotTable } from "./snapshot_table.js";
import { SpeedCharts } from "./speed_charts.js";
import { Tiles } from "./tiles.js";

const api = new Api();
const notice = new Notice(byId("notice"));
const poller = new Poller(api, show, onProblem);
const controls = new Controls(byId("controls"), api, notice.say.bind(notice), () => poller.refreshAll());
const views = [
  controls,
  new Tiles(byId("tiles")),
  new Ribbon(byId("ribbon")),
  new LossChart(byId("loss-chart")),
  new HoldoutCharts(byId("accuracy-chart"), byId("holdout-chart")),
  new Forgetting(byId("matrix"), byId("forgetting-chart")),
  new ShiftTable(byId("shift-table")),
  new RegimeTable(byId("regime-table"), controls),
  new Experts(byId("experts"), api),
  new Requests(byId("request-table"), byId("request-chart")),
  new SpeedCharts(byId("speed-chart"), byId("lag-chart")),
  new DeadLetters(byId("dead-letters")),
  new SnapshotTable(byId("snapshots"), controls),
  new PublicationTable(byId("publication"), byId("publication-table"), controls),
];
let shownAt = null;
let declined = false; // a person who has no token is asked once

/** Show the state. */
function show(state) {
  for (const view of views) view.update(state);
  notice.problem("");
  shownAt = Date.now();
  const { status } = state;
  document.title = `${status.phase} · streamlearn`;
  setText(byId("identity"), `${status.backbone} · ${status.adapter_preset} · ${status.dtype} on ${status.device}`);
  setText(byId("footer"), `streamlearn ${status.versions.streamlearn ?? ""}, started ${clock(Date.parse(status.started_at))}.
    Figures as of ${clock(shownAt)}. The page asks for them while it is visible.`);
}

/** Say why there is nothing new; where reading needs the token, ask for it. */
async function onProblem(error) {
  const needsToken = error instanceof ApiError && error.code === "no_token";
  const since = shownAt === null ? "" : ` The figures are those of ${clock(shownAt)}.`;
  notice.problem(needsToken ? "This daemon shows its figures to holders of the token only." : `No answer: ${error.message}.${since}`);
  if (!needsToken || declined || byId("token-dialog").open) return;
  const token = await askForToken(api.hasToken ? "The daemon does not accept this token." : "");
  declined = token === null;
  if (declined) return;
  api.useToken(token);
  await poller.refreshAll();
}

poller.refresh();

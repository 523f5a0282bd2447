#!/usr/bin/env python3
"""scripts/plot_timeline.py: what the drawing shows of a trace, and what it says of files that are none."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "plot_timeline.py")


def action(rank, op, micro_batch, stage, start_ms, duration_ms, replica=0):
    return {"ph": "X", "name": f"{op} {micro_batch} stage {stage}", "cat": "action", "pid": replica, "tid": rank, "ts": 1e3 * start_ms,
            "dur": 1e3 * duration_ms, "args": {"op": op, "micro_batch": micro_batch, "stage": stage}}


# 2 ranks, 10 ms, busy 6 and 8: bubble 30 %. Starts at 5 ms.
EVENTS = [action(0, "F", 17, 0, 5, 2), action(0, "B", 17, 0, 11, 4), action(1, "F", 17, 1, 7, 4), action(1, "B", 17, 1, 11, 4)]
PHASE = {"ph": "X", "name": "optimizer", "cat": "phase", "pid": 0, "tid": 0, "ts": 15e3, "dur": 10e3, "args": {}}


class PlotTimeline(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, events, title="a < b"):
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump({"otherData": {"title": title}, "traceEvents": events}, file)
        return self.path(name)

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)

    def draw(self, *traces):
        result = self.run_script(*traces, self.path("out.svg"))
        self.assertEqual(result.returncode, 0, result.stderr)
        root = xml.parse(self.path("out.svg")).getroot()
        name = "{http://www.w3.org/2000/svg}"
        texts = [e.text for e in root.iter(name + "text")]
        boxes = {e.find(name + "title").text: e for e in root.iter(name + "rect") if e.find(name + "title") is not None}
        return texts, boxes

    # Makespan and bubble of the actions alone; each action at its place; the number where it fits.
    def test_shows_actions_and_bubble(self):
        texts, boxes = self.draw(self.write("a.json", EVENTS + [PHASE]))
        self.assertIn("a < b: 10 ms, bubble 30.0%", texts)
        self.assertEqual(len(boxes), 5)
        first, last = boxes["forward of micro-batch 17, stage 0: 0.000 + 2.000 ms"], boxes["optimizer: 10.000 ms"]
        self.assertEqual(float(first.get("x")), 64)
        # 20 ms are 1120 wide
        self.assertAlmostEqual(float(first.get("width")), 112, places=1)
        self.assertAlmostEqual(float(last.get("x")), 64 + 560, places=1)
        self.assertEqual(texts.count("17"), 4)
        for name in ("rank 0", "rank 1", "forward", "backward", "bubble (idle)", "after the pipeline", "optimizer"):
            self.assertIn(name, texts)
        self.assertNotIn("weight gradient", texts)

    # Numbers that do not fit are left out; stages of a rank differ in colour, kinds of work too.
    def test_narrow_boxes_and_colours(self):
        events = [action(0, "F", 5, 0, 0, 1), action(0, "F", 5, 2, 1, 1), action(0, "I", 5, 2, 2, 300), action(0, "W", 5, 2, 302, 300)]
        texts, boxes = self.draw(self.write("a.json", events))
        self.assertEqual(texts.count("5"), 2)
        self.assertEqual(len({box.get("fill") for box in boxes.values()}), 4)
        self.assertIn("darker: later stage of the rank", texts)

    # Traces and replicas below each other on one scale.
    def test_several_panels(self):
        both = EVENTS + [dict(event, pid=1) for event in EVENTS]
        texts, boxes = self.draw(self.write("a.json", both, "one"), self.write("b.json", [action(0, "F", 0, 0, 0, 40)], "two"))
        for title in ("one, replica 0: 10 ms, bubble 30.0%", "one, replica 1: 10 ms, bubble 30.0%", "two: 40 ms, bubble 0.0%"):
            self.assertIn(title, texts)
        self.assertAlmostEqual(float(boxes["forward of micro-batch 0, stage 0: 0.000 + 40.000 ms"].get("width")), 1120, places=1)
        self.assertAlmostEqual(float(boxes["forward of micro-batch 17, stage 0: 0.000 + 2.000 ms"].get("width")), 56, places=1)

    # Each step of a trace is a panel that counts from its own first action, with its own bubble.
    def test_several_steps(self):
        later = [dict(event, ts=event["ts"] + 7e4, args=dict(event["args"], step=1)) for event in EVENTS[:3]]
        texts, boxes = self.draw(self.write("a.json", EVENTS + later, "one"))
        self.assertIn("one, step 0: 10 ms, bubble 30.0%", texts)
        self.assertIn("one, step 1: 10 ms, bubble 50.0%", texts)

    # One line that names the file, no traceback.
    def test_errors(self):
        with open(self.path("text"), "w", encoding="utf-8") as file:
            file.write("no json")
        for trace in (self.path("missing"), self.path("text"), self.write("empty.json", [])):
            result = self.run_script(trace, self.path("out.svg"))
            self.assertEqual(result.returncode, 1)
            self.assertRegex(result.stderr, f"^error: {trace}: .*\n$")
        self.assertIn("usage:", self.run_script("one").stderr)
        result = self.run_script(self.write("a.json", EVENTS), self.path("no/folder.svg"))
        self.assertRegex(result.stderr, "^error: .*no/folder.svg: .*\n$")


if __name__ == "__main__":
    unittest.main()

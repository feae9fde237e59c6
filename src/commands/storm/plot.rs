//! Two pictures in one SVG: latency over time, and latency by percentile. Both have latency upwards, on a logarithmic
//! scale, since what matters is whether a tail is ten times the middle.

use std::fmt::Write as _;

use super::knee::us_to_ms;
use super::stage::Measured;
use super::tally::Point;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 40.0;
/// Shares of requests that the second picture names.
const NAMED: [(f64, &str); 5] =
    [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];
const COLOURS: [&str; 3] = ["#3a7ca5", "#e0a458", "#b8413a"];

/// The whole picture.
pub(super) fn svg(measured: &Measured) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        HEIGHT * 2.0
    );
    over_time(&mut text, &measured.points);
    by_percentile(&mut text, measured);
    text + "</svg>\n"
}

fn over_time(text: &mut String, points: &[Point]) {
    let most = points.iter().map(|point| point.max_us).max().unwrap_or(1);
    let least = points.iter().map(|point| point.p50_us).min().unwrap_or(1);
    let scale = Scale::new(0.0, least, most);
    scale.frame(text, "latency over time, by when the answer came");
    for ((name, colour), x) in ["p50", "p99", "longest"].into_iter().zip(COLOURS).zip([700.0, 750.0, 800.0]) {
        element(text, &format!("<text x=\"{x}\" y=\"20\" fill=\"{colour}\">{name}</text>"));
    }
    let end = points.last().map_or(1, |point| point.at_ms.max(1));
    let x = |at_ms: u64| LEFT + (WIDTH - LEFT - RIGHT) * us_to_ms(at_ms) / us_to_ms(end);
    let curves: [fn(&Point) -> u64; 3] = [|point| point.p50_us, |point| point.p99_us, |point| point.max_us];
    for (curve, colour) in curves.into_iter().zip(COLOURS) {
        let places = points.iter().map(|point| (x(point.at_ms), scale.y(curve(point))));
        line(text, places, colour);
    }
    for share in [0.0, 0.5, 1.0] {
        let label = format!("{:.1} s", us_to_ms(end) * share);
        scale.below(text, LEFT + (WIDTH - LEFT - RIGHT) * share, &label);
    }
}

fn by_percentile(text: &mut String, measured: &Measured) {
    let times = &measured.latency;
    let scale = Scale::new(HEIGHT, times.value_at_quantile(0.0), times.max());
    scale.frame(text, "latency by percentile, from when a request was due");
    // Each step to the right is a tenth of the requests that are left.
    let nines = |share: f64| -(1.0 - share).log10();
    let x = |share: f64| LEFT + (WIDTH - LEFT - RIGHT) * nines(share) / 5.0;
    let shares = (0..100_u32).map(|step| 1.0 - 10_f64.powf(-f64::from(step) / 20.0));
    line(text, shares.map(|share| (x(share), scale.y(times.value_at_quantile(share)))), COLOURS[0]);
    for (share, name) in NAMED {
        scale.below(text, x(share), name);
    }
}

/// Latency upwards, in decades.
struct Scale {
    top: f64,
    low: f64,
    high: f64,
}

impl Scale {
    fn new(top: f64, least_us: u64, most_us: u64) -> Self {
        let decade = |us: u64| us_to_ms(us.max(1)).log10();
        let (low, high) = (decade(least_us).floor(), decade(most_us).ceil());
        Self { top, low, high: high.max(low + 1.0) }
    }

    fn y(&self, us: u64) -> f64 {
        let share = (us_to_ms(us.max(1)).log10() - self.low) / (self.high - self.low);
        self.top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share.clamp(0.0, 1.0)
    }

    fn frame(&self, text: &mut String, title: &str) {
        element(
            text,
            &format!("<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{title}</text>", self.top + 20.0),
        );
        let mut decade = self.low;
        while decade <= self.high {
            let share = (decade - self.low) / (self.high - self.low);
            let y = self.top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
            let right = WIDTH - RIGHT;
            element(
                text,
                &format!(
                    "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>"
                ),
            );
            let label = 10_f64.powf(decade);
            element(
                text,
                &format!(
                    "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label} ms</text>",
                    LEFT - 8.0,
                    y + 4.0
                ),
            );
            decade += 1.0;
        }
    }

    fn below(&self, text: &mut String, x: f64, label: &str) {
        let y = self.top + HEIGHT - BOTTOM + 20.0;
        element(text, &format!("<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"));
    }
}

fn line(text: &mut String, places: impl Iterator<Item = (f64, f64)>, colour: &str) {
    let places: Vec<String> = places.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    element(text, &format!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", places.join(" ")));
}

fn element(text: &mut String, element: &str) {
    // Writing to a string cannot fail.
    writeln!(text, "{element}").unwrap_or_default();
}

//! Values at JSON pointers, found in one pass over the bytes and without building a tree.
//!
//! Invariant: the answer depends on nothing but the bytes, and nothing outside a pointer's path can spoil it: neither
//! depth, nor broken UTF-8, nor a number that no machine type holds. A value is handed out as its source text, so
//! that long numbers keep every digit. A key that stands twice on a pointer's path is reported, wherever the second
//! one stands: two readers of such a body would disagree about the event.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Deepest pointer. The descent along pointers is recursive; what lies beside them is skipped without recursion.
const DEPTH_MAX: usize = 32;
/// Most different keys below one place, so that the keys seen fit one word.
const CHILDREN_MAX: usize = 64;

/// A parsed JSON pointer (RFC 6901): its keys, unescaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer(Vec<String>);

impl Pointer {
    /// Parses `/a/b~1c/0`; the empty text is the whole document.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let Some(rest) = text.strip_prefix('/') else {
            return Err(format!("JSON pointer {text:?} must start with \"/\""));
        };
        let keys: Vec<String> = rest.split('/').map(unescape).collect::<Option<_>>().ok_or_else(|| {
            format!("JSON pointer {text:?} has a bare \"~\": write \"~0\" for \"~\", \"~1\" for \"/\"")
        })?;
        if keys.len() > DEPTH_MAX {
            return Err(format!("JSON pointer {text:?} is deeper than {DEPTH_MAX}"));
        }
        Ok(Self(keys))
    }
}

impl Pointer {
    /// The key, if it is one level deep.
    pub(crate) fn only_key(&self) -> Option<&str> {
        match self.0.as_slice() {
            [key] => Some(key),
            _ => None,
        }
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|key| write!(f, "/{}", key.replace('~', "~0").replace('/', "~1")))
    }
}

fn unescape(token: &str) -> Option<String> {
    let mut parts = token.split('~');
    let mut key = parts.next()?.to_owned();
    for part in parts {
        let (escaped, rest) = part
            .strip_prefix('0')
            .map(|rest| ('~', rest))
            .or_else(|| Some(('/', part.strip_prefix('1')?)))?;
        key.push(escaped);
        key.push_str(rest);
    }
    Some(key)
}

/// The keys of an object in the order in which they stand there, also those that stand there twice; `None` if the text
/// is no object.
pub(crate) fn keys(text: &[u8]) -> Option<Vec<String>> {
    serde_json::from_slice(text).ok().map(|Keys(keys)| keys)
}

struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Keys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some((key, _)) = map.next_entry::<String, IgnoredAny>()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Where a pointer's value stands among those that one pass finds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Slot(usize);

/// Pointers compiled into one tree of keys.
#[derive(Debug)]
pub(crate) struct Pointers {
    nodes: Vec<Node>,
    slots: usize,
}

#[derive(Debug, Default)]
struct Node {
    key: String,
    /// The key read as an index, if it is one.
    index: Option<usize>,
    slot: Option<usize>,
    children: Vec<usize>,
}

impl Default for Pointers {
    fn default() -> Self {
        Self { nodes: vec![Node::default()], slots: 0 }
    }
}

impl Pointers {
    /// Adds a pointer; equal pointers share a slot.
    ///
    /// # Errors
    /// Too many different keys at one place.
    pub(crate) fn add(&mut self, pointer: &Pointer) -> Result<Slot, String> {
        let mut at = 0;
        for key in &pointer.0 {
            at = self.child(at, key)?;
        }
        let fresh = self.slots;
        let Some(node) = self.nodes.get_mut(at) else { return Ok(Slot(fresh)) };
        let slot = *node.slot.get_or_insert(fresh);
        self.slots = fresh.max(slot + 1);
        Ok(Slot(slot))
    }

    fn child(&mut self, parent: usize, key: &str) -> Result<usize, String> {
        if let Some(found) = self.children(parent).find(|child| self.key(*child) == key) {
            return Ok(found);
        }
        if self.children(parent).count() == CHILDREN_MAX {
            return Err(format!("more than {CHILDREN_MAX} different keys at one place of the body"));
        }
        let fresh = self.nodes.len();
        self.nodes.push(Node { key: key.to_owned(), index: parse_index(key), ..Node::default() });
        if let Some(node) = self.nodes.get_mut(parent) {
            node.children.push(fresh);
        }
        Ok(fresh)
    }

    fn children(&self, parent: usize) -> impl Iterator<Item = usize> + '_ {
        self.nodes.get(parent).into_iter().flat_map(|node| node.children.iter().copied())
    }

    fn key(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("", |node| &node.key)
    }

    fn slot(&self, node: usize) -> Option<usize> {
        self.nodes.get(node)?.slot
    }

    fn index(&self, node: usize) -> Option<usize> {
        self.nodes.get(node)?.index
    }

    /// Finds all pointers in `text`.
    ///
    /// The parser stops at a value that it cannot hand out (broken UTF-8) or that stands where an object was
    /// expected and cannot be read (a huge number). Each such stop names its place, and the pass is made again
    /// with that place skipped; a document without such faults is read once, one that is no JSON fails anyway.
    pub(crate) fn scan<'a>(&self, text: &'a [u8]) -> Scan<'a> {
        let mut skipped = Vec::new();
        loop {
            let walk = Walk::new(self, &skipped);
            let mut document = serde_json::Deserializer::from_slice(text);
            let seed = At { walk: &walk, node: 0 };
            let result = seed.deserialize(&mut document).and_then(|()| document.end());
            match (result, walk.step.get()) {
                (Ok(()), _) => return Scan::Json(walk.found.into_inner()),
                (Err(_), Some(step)) => skipped.push(step),
                (Err(_), None) => return Scan::NotJson,
            }
        }
    }
}

/// An array index as RFC 6901 writes it: no sign, no leading zero.
fn parse_index(key: &str) -> Option<usize> {
    let canonical = key == "0" || key.starts_with(|first: char| ('1'..='9').contains(&first));
    if canonical { key.parse().ok() } else { None }
}

/// What one pass found.
#[derive(Debug)]
pub(crate) enum Scan<'a> {
    /// The bytes are no JSON document.
    NotJson,
    /// They are; by slot.
    Json(Vec<Found<'a>>),
}

impl<'a> Scan<'a> {
    /// What stands in the slot; `None` if the bytes are no JSON document.
    pub(crate) fn get(&self, slot: Slot) -> Option<Found<'a>> {
        match self {
            Self::NotJson => None,
            Self::Json(found) => Some(found.get(slot.0).copied().unwrap_or(Found::Absent)),
        }
    }
}

/// What stands at a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    /// Nothing.
    Absent,
    /// This value, as its source text.
    Value(&'a str),
    /// A key on the way to it stands there twice.
    Twice,
    /// A value that is not UTF-8.
    Broken,
}

/// What the pass was doing when the parser stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Taking the source text of a node's value.
    Take(usize),
    /// Going into a node's value.
    Enter(usize),
}

struct Walk<'t, 'a> {
    pointers: &'t Pointers,
    skipped: &'t [Step],
    step: Cell<Option<Step>>,
    found: RefCell<Vec<Found<'a>>>,
}

impl<'t, 'a> Walk<'t, 'a> {
    fn new(pointers: &'t Pointers, skipped: &'t [Step]) -> Self {
        let found = RefCell::new(vec![Found::Absent; pointers.slots]);
        Self { pointers, skipped, step: Cell::new(None), found }
    }

    fn put(&self, slot: usize, found: Found<'a>) {
        if let Some(place) = self.found.borrow_mut().get_mut(slot) {
            *place = found;
        }
    }

    /// Marks everything at and below a node whose key came a second time.
    fn put_twice(&self, node: usize) {
        if let Some(slot) = self.pointers.slot(node) {
            self.put(slot, Found::Twice);
        }
        self.pointers.children(node).for_each(|child| self.put_twice(child));
    }
}

/// Reads the value of one node.
#[derive(Clone, Copy)]
struct At<'w, 't, 'a> {
    walk: &'w Walk<'t, 'a>,
    node: usize,
}

impl<'a> At<'_, '_, 'a> {
    fn child(self, node: usize) -> Self {
        Self { node, ..self }
    }

    fn enter<D: Deserializer<'a>>(self, value: D) -> Result<(), D::Error> {
        let step = Step::Enter(self.node);
        if self.walk.pointers.children(self.node).next().is_none() || self.walk.skipped.contains(&step) {
            return IgnoredAny::deserialize(value).map(drop);
        }
        self.walk.step.set(Some(step));
        value.deserialize_any(self)?;
        self.walk.step.set(None);
        Ok(())
    }
}

impl<'a> DeserializeSeed<'a> for At<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, value: D) -> Result<(), D::Error> {
        let Some(slot) = self.walk.pointers.slot(self.node) else { return self.enter(value) };
        let step = Step::Take(self.node);
        if self.walk.skipped.contains(&step) {
            self.walk.put(slot, Found::Broken);
            return self.enter(value);
        }
        self.walk.step.set(Some(step));
        let raw = <&RawValue>::deserialize(value)?;
        self.walk.step.set(None);
        self.walk.put(slot, Found::Value(raw.get()));
        if self.walk.pointers.children(self.node).next().is_none() {
            return Ok(());
        }
        self.enter(&mut serde_json::Deserializer::from_str(raw.get())).map_err(D::Error::custom)
    }
}

impl<'a> Visitor<'a> for At<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<(), M::Error> {
        self.walk.step.set(None);
        let mut seen = 0_u64;
        while let Some(child) = map.next_key_seed(Key(self))? {
            let Some((position, child)) = child else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let mark = 1_u64 << position;
            if seen & mark == 0 {
                map.next_value_seed(self.child(child))?;
            } else {
                map.next_value::<IgnoredAny>()?;
                self.walk.put_twice(child);
            }
            seen |= mark;
        }
        Ok(())
    }

    fn visit_seq<S: SeqAccess<'a>>(self, mut list: S) -> Result<(), S::Error> {
        self.walk.step.set(None);
        let pointers = self.walk.pointers;
        for index in 0_usize.. {
            let wanted = pointers.children(self.node).find(|child| pointers.index(*child) == Some(index));
            let more = match wanted {
                Some(child) => list.next_element_seed(self.child(child))?.is_some(),
                None => list.next_element::<IgnoredAny>()?.is_some(),
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Reads an object's key as bytes (one that is not UTF-8 is simply none of ours) and names the child it leads to.
struct Key<'w, 't, 'a>(At<'w, 't, 'a>);

impl<'a> DeserializeSeed<'a> for Key<'_, '_, 'a> {
    type Value = Option<(usize, usize)>;

    fn deserialize<D: Deserializer<'a>>(self, key: D) -> Result<Self::Value, D::Error> {
        key.deserialize_bytes(self)
    }
}

impl<'a> Visitor<'a> for Key<'_, '_, 'a> {
    type Value = Option<(usize, usize)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object's key")
    }

    fn visit_bytes<E>(self, key: &[u8]) -> Result<Self::Value, E> {
        let pointers = self.0.walk.pointers;
        let mut children = pointers.children(self.0.node).enumerate();
        Ok(children.find(|(_, child)| pointers.key(*child).as_bytes() == key))
    }
}

/// A value that is not text: neither a string that can be decoded nor a whole number.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotText;

/// The text of a value: a string's characters, a whole number's digits; `None` for null.
///
/// `123` and `"123"` give the same text. Numbers with a fraction or an exponent, and minus zero, have several
/// spellings for one value and are refused, as are a lone surrogate, objects, lists and truth values.
///
/// # Errors
/// [`NotText`].
pub(crate) fn text(raw: &str) -> Result<Option<Cow<'_, str>>, NotText> {
    if let Some(inner) = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        if !inner.contains('\\') {
            return Ok(Some(Cow::Borrowed(inner)));
        }
        return serde_json::from_str(raw).map(|text| Some(Cow::Owned(text))).or(Err(NotText));
    }
    if raw == "null" {
        return Ok(None);
    }
    let digits = raw.strip_prefix('-').unwrap_or(raw);
    let whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if whole && raw != "-0" { Ok(Some(Cow::Borrowed(raw))) } else { Err(NotText) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one pass finds at each pointer; `None` if the bytes are no JSON.
    fn find(pointers: &[&str], body: &[u8]) -> Option<Vec<String>> {
        let mut tree = Pointers::default();
        let slots: Vec<Slot> =
            pointers.iter().map(|text| tree.add(&Pointer::parse(text).unwrap()).unwrap()).collect();
        let scan = tree.scan(body);
        let show = |slot: &Slot| {
            scan.get(*slot).map(|found| match found {
                Found::Absent => "absent".to_owned(),
                Found::Value(raw) => raw.to_owned(),
                Found::Twice => "twice".to_owned(),
                Found::Broken => "broken".to_owned(),
            })
        };
        slots.iter().map(show).collect()
    }

    fn one(pointer: &str, body: impl AsRef<[u8]>) -> String {
        find(&[pointer], body.as_ref()).map_or("not json".to_owned(), |mut found| found.remove(0))
    }

    #[test]
    fn pointers_are_parsed_as_the_rfc_says() {
        let body = r#"{"":1,"a/b":2,"m~n":3,"k":[10,{"x":11}],"01":5,"~1":6}"#;
        for (pointer, value) in [
            ("/", "1"),
            ("/a~1b", "2"),
            ("/m~0n", "3"),
            ("/k/0", "10"),
            ("/k/1/x", "11"),
            ("/01", "5"),
            ("/~01", "6"),
        ] {
            assert_eq!(one(pointer, body), value, "{pointer}");
        }
        assert_eq!(one("", "[1]"), "[1]");
        for wrong in ["a", "a/b", "/~", "/~2", "/a~"] {
            assert!(Pointer::parse(wrong).is_err(), "{wrong}");
        }
        assert!(Pointer::parse(&"/a".repeat(DEPTH_MAX)).is_ok());
        assert!(Pointer::parse(&"/a".repeat(DEPTH_MAX + 1)).is_err());
    }

    #[test]
    fn list_indexes_have_no_leading_zero_and_no_sign() {
        for pointer in ["/00", "/+1", "/-", "/-1", "/9", "/1e0", "/99999999999999999999999"] {
            assert_eq!(one(pointer, "[1,2]"), "absent", "{pointer}");
        }
    }

    #[test]
    fn a_value_is_its_source_text() {
        for value in
            ["9007199254918489", "1e3", "1.0", "-0", "1e999", r#""a\u0062""#, "null", "{ \"x\" : [1 ] }"]
        {
            assert_eq!(one("/id", format!("{{ \"id\" : {value} }}")), value);
        }
        let digits = "7".repeat(400);
        assert_eq!(one("/id", format!("{{\"id\":{digits}}}")), digits);
    }

    #[test]
    fn what_is_no_json_is_named_so() {
        for body in [
            "",
            " ",
            "{",
            "{\"id\":1",
            "{\"id\":1}x",
            "{\"id\":\"a",
            "a=b",
            "{\"id\":1,}",
            "{\"id\":01}",
            "{\"id\":tru}",
        ] {
            assert_eq!(one("/id", body), "not json", "{body}");
        }
    }

    #[test]
    fn other_documents_than_objects_hold_nothing() {
        for body in ["null", "[]", "\"x\"", "1", "1e999", "true", "[{\"id\":1}]", "\"\\ud800\""] {
            assert_eq!(one("/id", body), "absent", "{body}");
        }
        assert_eq!(one("/id", b"\"\xff\""), "absent");
        for inner in ["null", "\"x\"", "1e999", "[]", "5", "\"\\ud800\""] {
            assert_eq!(one("/data/id", format!("{{\"data\":{inner}}}")), "absent", "{inner}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_seen_wherever_the_second_stands() {
        for body in [
            r#"{"data":{"id":"a","id":"a"}}"#,
            r#"{"data":{"id":"a"},"x":[{"id":1}],"data":{}}"#,
            r#"{"data":1,"data":{"id":"a"}}"#,
            r#"{"data":{"id":"a","x":{"id":2},"i\u0064":"b"}}"#,
            r#"{"data":{"id":null,"z":0,"id":"b"}}"#,
        ] {
            assert_eq!(one("/data/id", body), "twice", "{body}");
        }
        let beside = r#"{"x":1,"data":{"id":"a","y":1,"y":2},"x":{"id":1,"id":2}}"#;
        assert_eq!(one("/data/id", beside), "\"a\"");
    }

    #[test]
    fn broken_utf8_spoils_only_the_value_that_it_is_in() {
        let body = b"{\"x\":\"\xff\",\"\xfe\":1,\"id\":\"a\",\"type\":\"\xc3\",\"data\":{\"k\":\"\xff\",\"id\":\"b\"}}";
        let found = find(&["/id", "/type", "/data", "/data/id"], body).unwrap();
        assert_eq!(found, ["\"a\"", "broken", "broken", "\"b\""]);
        assert_eq!(one("/id", b"{\"id\":\"\xff\"}"), "broken");
        assert_eq!(one("/id", b"{\"id\":\"\xff"), "not json");
    }

    #[test]
    fn a_value_and_something_inside_it_can_both_be_sought() {
        let body = r#"{"data":{"id":"a","n":1e999,"list":[1,2]},"id":7}"#;
        let found =
            find(&["/data", "/data/id", "/data/list/1", "/data/n/x", "/id"], body.as_bytes()).unwrap();
        assert_eq!(found, [r#"{"id":"a","n":1e999,"list":[1,2]}"#, "\"a\"", "2", "absent", "7"]);
    }

    #[test]
    fn depth_beside_the_path_neither_overflows_nor_refuses() {
        for depth in [127, 129, 50_000] {
            let deep = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
            let objects = format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
            for deep in [deep, objects] {
                assert_eq!(one("/id", format!("{{\"id\":\"e1\",\"x\":{deep}}}")), "\"e1\"");
                assert_eq!(one("/id", format!("{{\"x\":{deep},\"id\":\"e1\"}}")), "\"e1\"");
                assert_eq!(one("/id", &deep), "absent");
            }
        }
    }

    #[test]
    fn equal_pointers_share_a_slot_and_keys_at_one_place_are_limited() {
        let mut tree = Pointers::default();
        let add = |tree: &mut Pointers, text: &str| tree.add(&Pointer::parse(text).unwrap());
        assert_eq!(add(&mut tree, "/a/b"), add(&mut tree, "/a/b"));
        assert_ne!(add(&mut tree, "/a"), add(&mut tree, "/a/b"));
        for key in 1..CHILDREN_MAX {
            assert!(add(&mut tree, &format!("/k{key}")).is_ok());
        }
        assert!(add(&mut tree, "/one-more").is_err());
    }

    #[test]
    fn only_strings_and_whole_numbers_are_text() {
        let good = [
            ("\"a\"", Some("a")),
            ("null", None),
            ("12", Some("12")),
            ("-5", Some("-5")),
            (r#""\u0041""#, Some("A")),
            ("\"\"", Some("")),
        ];
        for (raw, wanted) in good {
            assert_eq!(text(raw).unwrap().as_deref(), wanted, "{raw}");
        }
        for raw in ["1.0", "1e3", "-0", "true", "{}", "[]", r#""\ud800""#] {
            assert_eq!(text(raw), Err(NotText), "{raw}");
        }
    }
}

-- Stored responses and conversations. An empty line ends a statement.
--
-- An object is a response or a conversation. A response that was deleted or evicted is hidden while
-- a later response continues it. `owners` has the totals of the objects of each API key.

CREATE TABLE objects (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    request_id TEXT, -- NULL: a conversation
    changed REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400), -- Unix time
    num_bytes INTEGER NOT NULL,
    is_hidden INTEGER NOT NULL DEFAULT 0,
    server TEXT, -- runs the response in the background
    is_cancelled INTEGER NOT NULL DEFAULT 0, -- another server asks for it
    previous INTEGER, -- the response that it continues
    conversation INTEGER,
    last_item INTEGER, -- of the conversation, before the input
    input BLOB, -- a JSON list
    body BLOB NOT NULL, -- a JSON object
    UNIQUE (owner, name)
)

CREATE INDEX request_ids ON objects (owner, request_id) WHERE request_id IS NOT NULL

CREATE INDEX continuations ON objects (previous) WHERE previous IS NOT NULL

CREATE INDEX ages_by_owner ON objects (owner, changed) WHERE server IS NULL AND is_hidden = 0

CREATE INDEX ages ON objects (changed) WHERE server IS NULL AND is_hidden = 0

CREATE INDEX servers ON objects (server) WHERE server IS NOT NULL

CREATE TABLE events (
    object INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE,
    number INTEGER NOT NULL,
    event BLOB NOT NULL,
    PRIMARY KEY (object, number)
) WITHOUT ROWID

CREATE TABLE items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE,
    name TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (conversation, name)
)

CREATE INDEX items_by_conversation ON items (conversation)

CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE objects SET num_bytes = num_bytes + length(new.body) + 256,
    changed = (julianday('now') - 2440587.5) * 86400 WHERE id = new.conversation;
END

CREATE TRIGGER item_removed AFTER DELETE ON items BEGIN
    UPDATE objects SET num_bytes = num_bytes - length(old.body) - 256,
    changed = (julianday('now') - 2440587.5) * 86400 WHERE id = old.conversation;
END

CREATE TABLE owners (
    owner TEXT PRIMARY KEY,
    num_objects INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
) WITHOUT ROWID

CREATE TRIGGER added AFTER INSERT ON objects BEGIN
    INSERT INTO owners VALUES (new.owner, 1, new.num_bytes) ON CONFLICT (owner) DO UPDATE
    SET num_objects = num_objects + 1, num_bytes = num_bytes + excluded.num_bytes;
END

CREATE TRIGGER changed AFTER UPDATE OF num_bytes, is_hidden ON objects BEGIN
    UPDATE owners SET num_objects = num_objects - new.is_hidden + old.is_hidden,
    num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner = new.owner;
END

CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
    UPDATE owners SET num_objects = num_objects - 1 + old.is_hidden,
    num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
END
